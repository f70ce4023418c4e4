"""Convert distributed PyTorch checkpoints between layouts.

`convert` does it; `plan_conversion` says beforehand what it will do. Both are loaded when
they are first used, so that `ckpt-convert --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_convert.execute import convert, execute_plan
    from ckpt_convert.plan import ConversionPlan, plan_conversion
    from ckpt_convert.report import ConversionReport

    __version__: str

__all__ = ["ConversionPlan", "ConversionReport", "convert", "execute_plan", "plan_conversion"]

_ROOMS = {
    "ConversionPlan": "plan",
    "ConversionReport": "report",
    "convert": "execute",
    "execute_plan": "execute",
    "plan_conversion": "plan",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Reading the metadata of an installed package takes longer than all of --help.
        return import_module("importlib.metadata").version("ckpt-convert")
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
