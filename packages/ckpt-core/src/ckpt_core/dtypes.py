"""Names of dtypes: torch's, and the safetensors strings that specs use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

# safetensors.torch maps the same pairs; that module imports torch, so they stand here.
NAME_BY_TORCH: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex32": "C32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "C128",
}
"""Safetensors dtype string by the name of torch's dtype without `torch.`."""

# exponent bits, stored significand bits
_FLOATS: dict[str, tuple[int, int]] = {
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
    "F16": (5, 10),
    "BF16": (8, 7),
    "F32": (8, 23),
    "F64": (11, 52),
}


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Name a torch dtype as specs do.

    Raises:
        ConfigError: If checkpoints here cannot name it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in NAME_BY_TORCH:
        raise ConfigError(f"dtype {dtype} has no name in a checkpoint; known are {sorted(NAME_BY_TORCH)}")
    return NAME_BY_TORCH[name]


def holds_every_value(wide: str, narrow: str) -> bool:
    """Whether every value of dtype `narrow` is a value of dtype `wide`."""
    if wide == narrow:
        return True
    if wide in _FLOATS and narrow in _FLOATS:
        return all(w >= n for w, n in zip(_FLOATS[wide], _FLOATS[narrow], strict=True))
    return False
