"""Names of dtypes: torch's, its storage classes', and the safetensors strings used everywhere here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPE_OF_TORCH: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
}
"""Attribute of `torch` -> dtype string.

One element of `float4_e2m1fn_x2` is a byte that holds two F4 elements, so shapes differ by
a factor of two in the last dimension.
"""

TORCH_OF_DTYPE: dict[str, str] = {dtype: name for name, dtype in DTYPE_OF_TORCH.items()}
"""Dtype string -> attribute of `torch`."""

DTYPE_OF_STORAGE: dict[str, str] = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
}
"""Typed storage class of `torch` -> dtype string; newer dtypes have none and use `UntypedStorage`."""

_FLOAT_BITS: dict[str, tuple[int, int]] = {
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
    "F16": (5, 10),
    "BF16": (8, 7),
    "F32": (8, 23),
    "F64": (11, 52),
}
"""Exponent and stored significand bits of a floating-point dtype."""


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Name a torch dtype as specs do.

    Raises:
        ConfigError: If specs have no name for it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_OF_TORCH:
        raise ConfigError(f"dtype {dtype} has no name in a checkpoint; known are {sorted(DTYPE_OF_TORCH)}")
    return DTYPE_OF_TORCH[name]


def holds_every_value(wide: str, narrow: str) -> bool:
    """Whether every value of dtype `narrow` is a value of dtype `wide`."""
    if wide == narrow:
        return True
    if wide in _FLOAT_BITS and narrow in _FLOAT_BITS:
        return all(w >= n for w, n in zip(_FLOAT_BITS[wide], _FLOAT_BITS[narrow], strict=True))
    return False
