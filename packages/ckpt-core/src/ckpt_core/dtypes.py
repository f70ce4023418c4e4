"""Names of dtypes: torch's, its storage classes', and the safetensors strings used everywhere here."""

from __future__ import annotations

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
