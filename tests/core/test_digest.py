from __future__ import annotations

import hashlib

from ckpt_core.digest import digest_tensor


def test_digest_is_sha256_of_dtype_shape_and_bytes() -> None:
    prefix = b"BF16[2,3]\0"
    expected = f"sha256:{hashlib.sha256(prefix + bytes(range(12))).hexdigest()}"
    assert digest_tensor("BF16", (2, 3), [bytes(range(12))]) == expected


def test_digest_does_not_depend_on_where_the_bytes_are_cut() -> None:
    data = bytes(range(256))
    blocks: list[bytes | bytearray | memoryview] = [data[:1], bytearray(data[1:100]), memoryview(data)[100:]]
    assert digest_tensor("U8", (256,), blocks) == digest_tensor("U8", (256,), [data])


def test_digest_tells_dtype_and_shape_apart() -> None:
    data = bytes(8)
    names = [("F32", (2,)), ("I32", (2,)), ("F32", (1, 2)), ("F32", (2, 1)), ("F64", (1,)), ("F64", ())]
    assert len({digest_tensor(dtype, shape, [data]) for dtype, shape in names}) == len(names)


def test_empty_tensors_of_different_shapes_have_different_digests() -> None:
    assert digest_tensor("F32", (0, 3), []) != digest_tensor("F32", (3, 0), [])
