"""How a finished directory takes the place of another, and what a kill in between leaves.

All names lie beside the target `NAME` (behind its links, if it is one):

- `.NAME.lock`: held by the one writer for as long as it stages and publishes.
- `.NAME.partial`: the stage. With the lock free it is a leftover, removed by the next stage
  unless that one resumes it.
- `.NAME.old`: the previous set, whole, for the moment between two renames where the file
  system cannot exchange two directories in one step.
- `.NAME.swap`: never a checkpoint that anybody needs: the finished new set while the previous
  one is still at the target, later the previous set while it is removed.

After a kill at any point the target is the old set, the new set, or absent with the old set
at `.NAME.old`. Whoever calls these functions holds the lock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from ckpt_core.checkpoint_files import raise_walk_error
from ckpt_core.errors import TargetError

_AT_FDCWD = -100  # fcntl.h: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # linux/fs.h


class Recovery(StrEnum):
    """What `recover` did."""

    NOTHING = "nothing"
    """There was no leftover of a publication."""
    RESTORED = "restored"
    """The target was absent; the previous set is back."""
    REMOVED = "removed"
    """The target was there; what an earlier publication left beside it is gone."""
    LEFT = "left"
    """Something is beside the target that is in use, not ours, or may not be removed."""


@dataclass(frozen=True, slots=True)
class Places:
    """The target and the names beside it."""

    target: Path
    partial: Path
    old: Path
    swap: Path
    lock: Path

    @classmethod
    def beside(cls, target: Path) -> Self:
        """Resolve `target`, so that a link stays and what it points to is replaced."""
        # realpath does not raise on a loop of links; using the path does, with a clear errno.
        real = Path(os.path.realpath(target))
        if not real.name:
            raise TargetError(f"{target}: the root of a file system cannot be a checkpoint; name a directory in it")
        names = (f".{real.name}.{suffix}" for suffix in ("partial", "old", "swap", "lock"))
        return cls(real, *(real.with_name(name) for name in names))


def recover_places(places: Places, *, is_ours: bool) -> Recovery:
    """Put the previous set back where the target is absent, and clear it where it is not.

    Args:
        places: The target and the names beside it.
        is_ours: Whether a killed writer left its lock file. Without one, somebody else made
            the directory that has the name of a previous set, and it stays.
    """
    if os.path.lexists(places.old) and not os.path.lexists(places.target):
        places.old.rename(places.target)
        sync_directory(places.target.parent)
        remove_tree(places.swap)
        return Recovery.RESTORED
    if os.path.lexists(places.old) and not is_ours:
        return Recovery.LEFT
    return Recovery.REMOVED if clear_previous(places) else Recovery.NOTHING


def clear_previous(places: Places) -> bool:
    """Remove the previous set; rename it first, because half of it must never be restored."""
    found = os.path.lexists(places.old) or os.path.lexists(places.swap)
    remove_tree(places.swap)
    if os.path.lexists(places.old):
        places.old.rename(places.swap)
        remove_tree(places.swap)
    return found


def require_free_names(places: Places) -> None:
    """Refuse to set a previous set aside under a name that is taken.

    Raises:
        TargetError: Something that was not written here has that name.
    """
    if os.path.lexists(places.old):
        raise TargetError(f"{places.old}: is in the way and was not written here; move it elsewhere")


def replace_target(places: Places) -> None:
    """Put the stage at the target and the set that stands there aside.

    Raises:
        TargetError: The name for the set aside is taken.
        OSError: A rename failed; stage and target are where they were.
    """
    require_free_names(places)
    new = places.partial.stat()
    # Out of the stage's name first: after the exchange it is the previous set, which nobody may resume.
    places.partial.rename(places.swap)
    try:
        if not _exchange(places.swap, places.target):
            places.target.rename(places.old)
            places.swap.rename(places.target)
    except BaseException:
        _undo_replace(places, new)
        raise


def _undo_replace(places: Places, new: os.stat_result) -> None:
    """Go back to the old set, unless an interrupt came after the new one was in place."""
    if not os.path.lexists(places.target):
        places.old.rename(places.target)
    if places.swap.is_dir() and os.path.samestat(places.swap.stat(), new):
        places.swap.rename(places.partial)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step; False where the file system or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(result == 0)


def make_parents(directory: Path) -> None:
    """Create `directory` and what is missing above it, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory with all it holds, a file or a link; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(directory: Path) -> None:
    """Flush every file below `directory`, then the directories from the innermost out."""
    for parent, _, names in os.walk(directory, topdown=False, onerror=raise_walk_error):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                _sync_file(path)
        sync_directory(Path(parent))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory, so that renames in it survive a power failure."""
    try:
        _sync_file(path)
    except OSError as error:
        # Some network file systems have no fsync for directories; they order renames themselves.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
