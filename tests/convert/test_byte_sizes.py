from __future__ import annotations

import pytest
from ckpt_convert.byte_sizes import parse_size, read_size
from ckpt_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("7B", 7), ("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("2GiB", 2**31), ("1.5KB", 1500), ("1TiB", 2**40)],
)
def test_sizes_are_read_in_thousands_and_in_1024s(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "5 parsecs", "0", "1e9", "0.2", "9" * 400, "9" * 400 + "TB", "9223372036854775808"]
)
def test_what_is_no_positive_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a positive number") as caught:
        parse_size(text)
    assert repr(text[:80]) in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("value", "size"), [(7, 7), ("5GB", 5 * 10**9)])
def test_a_size_is_a_number_or_a_text(value: object, size: int) -> None:
    assert read_size(value) == size


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None, b"5GB", float("nan")])
def test_what_is_neither_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size .*expected at least 1 byte"):
        read_size(value)
