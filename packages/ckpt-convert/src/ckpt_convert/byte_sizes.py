"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from ckpt_core.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("I", 1024))
}


def parse_size(text: str) -> int:
    """Read `"5GB"`, `"512 MiB"` or `"1000"` as bytes; GB counts in 1000s, GiB in 1024s.

    Raises:
        ConfigError: `text` is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if size < 1:
        raise ConfigError(f"size {text!r}: expected a positive number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return size
