"""Tensors whose every byte tells where it belongs, and independent ways to read them back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
"""What safetensors holds and torch can cut and save."""


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Make a tensor of counted bytes (NaN payloads among the floats): no two places look alike."""
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        # Thue-Morse: not periodic, so a shifted chunk shows.
        return torch.tensor([(i + seed).bit_count() % 2 for i in range(numel)], dtype=torch.bool).reshape(shape)
    count = torch.arange(numel * dtype.itemsize, dtype=torch.int64) + 7919 * seed
    # The high byte of the count comes in too, so that bytes 256 apart differ.
    return (count * 2654435761 >> 7).to(torch.uint8).view(dtype).reshape(shape)


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Describe tensors so that two descriptions are equal exactly when the tensors are, bit for bit."""
    return {fqn: (t.dtype, tuple(t.shape), read_bytes(t)) for fqn, t in tensors.items()}


def read_safetensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read a set with the safetensors library, through its index if there is one."""
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = set(weight_map.values())
    assert {path.name for path in directory.glob("*.safetensors")} == files
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(files):
        with safe_open(directory / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert not tensors.keys() & set(file.keys())
            tensors |= {fqn: file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118  not a mapping
    if index.exists():
        assert weight_map.keys() == tensors.keys()
    return tensors
