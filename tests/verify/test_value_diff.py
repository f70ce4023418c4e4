from __future__ import annotations

import pytest
from ckpt_core.spec import DTYPE_BITS
from ckpt_verify.value_diff import StreamLengthError, ValueDiff, find_value_diff, render_element
from hypothesis import given
from hypothesis import strategies as st


def cut(data: bytes, length: int) -> list[bytes]:
    return [data[start : start + length] for start in range(0, len(data), length)]


def expect_diff(a: bytes, b: bytes, dtype: str, numel: int) -> ValueDiff | None:
    """Find the difference one element at a time, on Python integers."""
    bits = DTYPE_BITS[dtype]
    left, right = (int.from_bytes(data, "little") for data in (a, b))
    mask = (1 << bits) - 1
    differing = [i for i in range(numel) if left >> i * bits & mask != right >> i * bits & mask]
    if not differing:
        return None
    size = max(1, bits // 8)
    at = differing[0] * bits // 8
    return ValueDiff(len(differing), differing[0], a[at : at + size], b[at : at + size])


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPE_BITS)), numel=st.integers(0, 60))
def test_any_flipped_bits_are_found_and_counted(data: st.DataObject, dtype: str, numel: int) -> None:
    size = (numel * DTYPE_BITS[dtype] + 7) // 8
    a = bytes(range(size % 251)) + bytes(size - size % 251)
    b = bytearray(a)
    for bit in data.draw(st.lists(st.integers(0, max(0, size * 8 - 1)), max_size=3 if numel else 0)):
        b[bit // 8] ^= 1 << bit % 8
    unit = max(1, DTYPE_BITS[dtype] // 8) * data.draw(st.integers(1, 20))
    blocks = (cut(bytes(content), unit) for content in (a, b))
    assert find_value_diff(*blocks, dtype=dtype, numel=numel) == expect_diff(a, bytes(b), dtype, numel)


@pytest.mark.parametrize("numel", [7, 9])
def test_a_stream_of_another_length_is_not_a_comparison(numel: int) -> None:
    data = bytes(8)
    with pytest.raises(StreamLengthError, match=f"8 bytes were read for {numel} elements"):
        find_value_diff([data], [data], dtype="U8", numel=numel)


@pytest.mark.parametrize(("a", "b"), [(8, 6), (6, 8), (8, 0), (0, 8), (8, 7)])
def test_streams_that_do_not_pair_up_are_not_compared(a: int, b: int) -> None:
    with pytest.raises(StreamLengthError, match="stands beside one of"):
        find_value_diff(cut(bytes(a), 2), cut(bytes(b), 2), dtype="U16", numel=4)


@pytest.mark.parametrize(
    ("dtype", "raw", "shown"),
    [
        ("F32", b"\0\0\x80\x3f", "1.0 (0x3f800000)"),
        ("F32", b"\1\0\xc0\x7f", "nan (0x7fc00001)"),
        ("F32", b"\0\0\0\x80", "-0.0 (0x80000000)"),
        ("BF16", b"\x80\x3f", "1.0 (0x3f80)"),
        ("F16", b"\0\x3c", "1.0 (0x3c00)"),
        ("I64", b"\xff" * 8, "-1 (0xffffffffffffffff)"),
        ("BOOL", b"\1", "1 (0x01)"),
        ("F8_E4M3", b"\x38", "0x38"),
        ("C64", b"\0\0\x80\x3f\0\0\0\x40", "(1+2j) (0x400000003f800000)"),
    ],
)
def test_an_element_is_shown_as_number_and_bits(dtype: str, raw: bytes, shown: str) -> None:
    assert render_element(dtype, raw) == shown
