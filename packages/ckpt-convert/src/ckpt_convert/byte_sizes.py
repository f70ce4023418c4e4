"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from ckpt_core.errors import ConfigError, describe_value

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("I", 1024))
}


_LIMIT = 2**63
"""Larger than any file."""


def read_size(value: object) -> int:
    """Take a number of bytes as it is, and read a text as `parse_size` does.

    Raises:
        ConfigError: `value` is neither, or no positive size.
    """
    if isinstance(value, str):
        return parse_size(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"max_shard_size {describe_value(value)}: expected at least 1 byte, or a text such as '5GB'")
    return value


def parse_size(text: str) -> int:
    """Read `"5GB"`, `"512 MiB"` or `"1000"` as bytes; GB counts in 1000s, GiB in 1024s.

    Raises:
        ConfigError: `text` is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * factor if match and factor else 0
    if not 1 <= size < _LIMIT:
        raise ConfigError(
            f"size {describe_value(text)}: expected a positive number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return int(size)
