"""Before a command reads a checkpoint: is it there, or set aside by a replacement that was killed?"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from ckpt_core.staging import recover


def recover_source(path: str | os.PathLike[str]) -> None:
    """Finish or undo what a killed replacement left at `path`, or at a directory that it lies in.

    For commands, before `ckpt_core.reader.open_checkpoint`, which renames nothing.

    Raises:
        TargetError: The checkpoint is set aside and cannot be put back.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100  resolve() raises on a loop of links
    absent = list(takewhile(lambda above: not os.path.lexists(above), place.parents))
    # The outer directory first: what it holds is there only then.
    for each in (*reversed(absent), place):
        if each.name:
            recover(each)
