"""JSON that can be understood in one way only."""

from __future__ import annotations

import json
from typing import NoReturn


def parse_strict_json(text: str, *, any_keys: bool = False) -> object:
    """Parse JSON in which no key stands twice and every number is one.

    Args:
        text: The JSON.
        any_keys: Whether a key may hold lone surrogates, as the names of files do that are no
            valid Unicode; such a key is valid JSON, but cannot be written as UTF-8 again.

    Raises:
        ValueError: The text is no such JSON, or nested too deeply.
    """
    build = _build_unique if any_keys else _build_encodable
    try:
        return json.loads(text, object_pairs_hook=build, parse_constant=_refuse_constant)
    except RecursionError as err:
        raise ValueError("brackets nested too deeply") from err


def _build_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    built: dict[str, object] = {}
    for key, value in pairs:
        if key in built:
            raise ValueError(f"the key {key!r} twice")
        built[key] = value
    return built


def _build_encodable(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for key, _ in pairs:
        key.encode()
    return _build_unique(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON")
