from __future__ import annotations

import json

import pytest
from ckpt_core.strict_json import parse_strict_json
from hypothesis import given
from hypothesis import strategies as st

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(value=VALUES, any_keys=st.booleans())
def test_what_json_writes_is_read(value: object, *, any_keys: bool) -> None:
    assert parse_strict_json(json.dumps(value), any_keys=any_keys) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "'a' twice"),
        ('[{"b": {"a": 1, "a": 2}}]', "'a' twice"),
        ("[NaN]", "NaN"),
        ("-Infinity", "Infinity"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
@pytest.mark.parametrize("any_keys", [True, False])
def test_what_can_be_read_in_two_ways_is_refused(text: str, message: str, *, any_keys: bool) -> None:
    with pytest.raises(ValueError, match=message):
        parse_strict_json(text, any_keys=any_keys)


def test_a_key_that_is_no_valid_unicode_is_read_only_on_request() -> None:
    text = '{"\\udcff": 1}'
    assert parse_strict_json(text, any_keys=True) == {"\udcff": 1}
    with pytest.raises(ValueError, match="surrogates not allowed"):
        parse_strict_json(text)
