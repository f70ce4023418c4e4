"""How a finished directory takes the place of another, and what a kill in between leaves.

All names lie beside the target `NAME` (behind its links, if it is one):

- `.NAME.lock`: held by the one writer for as long as it stages and publishes. A file that
  nobody holds says that what lies beside it is of an earlier writer; without one it is
  somebody else's and stays.
- `.NAME.partial`: the stage. With the lock free it is a leftover, removed by the next stage
  unless that one resumes it.
- `.NAME.old`: the previous set, whole, for the moment between two renames where the file
  system cannot exchange two directories in one step.
- `.NAME.swap`: never a checkpoint that anybody needs: the finished new set while the previous
  one is still at the target, later the previous set while it is removed.

After a kill at any point the target is the old set, the new set, or absent with the old set
at `.NAME.old`. Whoever calls these functions holds the lock. Only writers remove anything;
whoever wants to read puts the old set back where the target is absent, and no more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from contextlib import suppress
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
    LEFT = "left"
    """Something is beside the target, which is in use, not ours, or for the next writer to remove."""


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

    @property
    def leftovers(self) -> tuple[Path, ...]:
        """What stands under the names beside the target, the lock left out."""
        return tuple(path for path in (self.partial, self.old, self.swap) if os.path.lexists(path))


def restore_previous(places: Places) -> Recovery:
    """Put the previous set back where the target is absent; remove nothing."""
    if os.path.lexists(places.target) or not os.path.lexists(places.old):
        return Recovery.LEFT if places.leftovers else Recovery.NOTHING
    places.old.rename(places.target)
    sync_directory(places.target.parent)
    return Recovery.RESTORED


def clear_leftovers(places: Places, *, is_ours: bool, keep_stage: bool) -> None:
    """Make room for a new stage.

    Args:
        places: The target, which is settled, and the names beside it.
        is_ours: Whether an earlier writer left its lock file.
        keep_stage: Whether a stage is for the caller to resume.

    Raises:
        TargetError: Somebody else made something under one of the names.
    """
    if places.leftovers and not is_ours:
        raise TargetError(f"{places.leftovers[0]}: is in the way and was not written here; move it elsewhere")
    clear_previous(places)
    if not keep_stage:
        remove_tree(places.partial)


def clear_previous(places: Places) -> None:
    """Remove the previous set; rename it first, because half of it must never be restored."""
    remove_tree(places.swap)
    if os.path.lexists(places.old):
        places.old.rename(places.swap)
        remove_tree(places.swap)


def copy_access(old: Path, new: Path) -> None:
    """Give the directory `new` the mode and, as far as permitted, the owner and group of `old`."""
    was, now = old.stat(), new.stat()
    for owner, group in ((was.st_uid, -1), (-1, was.st_gid)):
        if owner not in {-1, now.st_uid} or group not in {-1, now.st_gid}:
            with suppress(OSError):
                os.chown(new, owner, group)
    # After the owner, whose change clears bits of the mode. Some file systems have no modes to change.
    with suppress(OSError):
        new.chmod(stat.S_IMODE(was.st_mode))


def require_free_names(places: Places) -> None:
    """Refuse to set a previous set aside under a name that is taken: it is cleared with what has that name.

    Raises:
        TargetError: Something that was not written here has that name.
    """
    for path in (places.old, places.swap):
        if os.path.lexists(path):
            raise TargetError(f"{path}: is in the way and was not written here; move it elsewhere")


def replace_target(places: Places) -> None:
    """Put the stage at the target and the set that stands there aside, under names that are free.

    Raises:
        OSError: A rename failed; stage and target are where they were.
    """
    copy_access(places.target, places.partial)
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
