"""Write a directory beside its target, then publish it whole.

Names, all in the directory of the target `NAME` (behind its links, if it is one):

- `.NAME.lock`: held by the one writer for as long as it stages and publishes.
- `.NAME.partial`: the stage. With the lock free it is a leftover, removed by the next stage
  unless that one resumes it.
- `.NAME.old`: the previous set, whole, for the moment between two renames where the file
  system cannot exchange two directories in one step.
- `.NAME.swap`: never a checkpoint that anybody needs: the finished new set while the previous
  one is still at the target, later the previous set while it is removed.

After a kill at any point the target is the old set, the new set, or absent with the old set
at `.NAME.old`; `recover` puts that one back and clears what is left.

There are no collectives here. In a process group one rank stages and publishes, the others
write into `Stage.path`, and the caller provides the barriers between.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from ckpt_core.errors import CheckpointError, LockHeldError, SaveError, SpaceError, TargetError
from ckpt_core.file_lock import FileLock

_AT_FDCWD = -100
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
class _Places:
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


class Stage:
    """A directory that is being written, and the lock that keeps other writers away.

    Ends with exactly one of `publish`, `keep` or `discard`.
    """

    def __init__(self, places: _Places, lock: FileLock, *, replace: bool) -> None:
        """Take over a created stage; use `open_stage`."""
        self._places = places
        self._lock = lock
        self._replace = replace
        self._is_published = False

    @property
    def target(self) -> Path:
        """Where the directory will stand: absolute, links resolved."""
        return self._places.target

    @property
    def path(self) -> Path:
        """Where to write, absolute."""
        return self._places.partial

    @property
    def is_open(self) -> bool:
        """Whether the stage is neither published, kept nor discarded."""
        return self._lock.is_held

    @property
    def is_published(self) -> bool:
        """Whether the target holds what was staged, even if `publish` was interrupted after that."""
        return self._is_published

    def sync(self) -> None:
        """Make every file and directory of the stage durable.

        Raises:
            SaveError: A file could not be written out; the target is untouched.
            SpaceError: The file system is full.
        """
        with _translated(self.path, "cannot be made durable"):
            _sync_tree(self.path)

    def publish(self) -> None:
        """Make the stage durable and put it at the target, whole.

        On an error before `is_published` the target holds what it held before, and the stage
        stays open.

        Raises:
            TargetError: The target is taken, or the file system refuses to rename.
            SaveError: The storage failed, or the stage is no longer open.
            SpaceError: The file system is full.
        """
        self._require_open()
        self.sync()
        with _translated(self.target, "cannot be published"):
            self._put_at_target()
        self._is_published = True
        try:
            with _translated(self.target, "is published, but its directory cannot be made durable"):
                _sync_directory(self.target.parent)
            # What is left of the old set now is cleared by the next command.
            with suppress(OSError):
                _clear(self._places)
        finally:
            self._lock.release()

    def _put_at_target(self) -> None:
        places = self._places
        if not os.path.lexists(places.target):
            places.partial.rename(places.target)
        elif self._replace:
            _replace_target(places)
        else:
            raise TargetError(f"{places.target}: appeared while it was being written; nothing was replaced")

    def keep(self) -> None:
        """Leave the stage where it is, so that `open_stage(..., resume=True)` finds it."""
        self._require_open()
        self._lock.release()

    def discard(self) -> None:
        """Remove the stage; the target is untouched."""
        self._require_open()
        with _translated(self.path, "cannot be removed"):
            _remove_tree(self.path)
        self._lock.release()

    def _require_open(self) -> None:
        if not self.is_open:
            raise SaveError(f"{self.path}: this stage is already published, kept or discarded; open a new one")


def open_stage(target: Path, *, replace: bool = False, resume: bool = False) -> Stage:
    """Lock `target` against other writers and create the directory that will become it.

    Missing parents are created. What an earlier, killed writer left is recovered first.

    Args:
        target: Directory to write. If it is a link, what it points to is written.
        replace: Whether a directory that stands at the target may be replaced.
        resume: Keep what a leftover stage holds instead of starting from nothing.

    Raises:
        TargetError: The target is taken, a file, a mount point or locked by another writer,
            or its parent cannot be written.
    """
    places = _Places.beside(target)
    with _translated(places.target, "cannot be written"):
        _make_parents(places.target.parent)
        lock = FileLock.acquire(places.lock)
        try:
            _recover_locked(places, is_ours=not lock.is_new)
            _check_target(places.target, replace=replace)
            if not resume:
                _remove_tree(places.partial)
            places.partial.mkdir(exist_ok=resume)
        except BaseException:
            lock.release()
            raise
    return Stage(places, lock, replace=replace)


@contextmanager
def stage_directory(
    target: Path,
    *,
    replace: bool = False,
    resume: bool = False,
    keep_on: tuple[type[BaseException], ...] = (),
) -> Iterator[Stage]:
    """Open a stage for a `with` block, which publishes it or loses it.

    Args:
        target: As for `open_stage`.
        replace: As for `open_stage`.
        resume: As for `open_stage`.
        keep_on: Exceptions after which the stage stays for a later resume; after every other
            one, and when the block ends without publishing, it is removed.
    """
    stage = open_stage(target, replace=replace, resume=resume)
    try:
        yield stage
    except keep_on:
        if stage.is_open:
            stage.keep()
        raise
    finally:
        if stage.is_open:
            stage.discard()


def recover(target: Path) -> Recovery:
    """Finish or undo what a killed publication to `target` left; call before reading it.

    A stage that was kept or cut short is not touched. While another writer publishes, and
    where a leftover may not be removed but the target is there, nothing is done.

    Raises:
        TargetError: The target is absent and the previous set cannot be put back.
    """
    places = _Places.beside(target)
    if not (os.path.lexists(places.old) or os.path.lexists(places.swap)):
        return Recovery.NOTHING
    try:
        lock = FileLock.acquire(places.lock)
    except LockHeldError:
        return Recovery.LEFT
    except OSError as error:
        return _settle_for_target(places, error)
    try:
        return _recover_locked(places, is_ours=not lock.is_new)
    except OSError as error:
        return _settle_for_target(places, error)
    finally:
        lock.release()


def require_free_space(path: Path, nbytes: int) -> None:
    """Refuse to begin what the file system of `path` cannot hold.

    Args:
        path: Where to write; its nearest existing parent decides.
        nbytes: Bytes that will be written.

    Raises:
        SpaceError: Fewer bytes are available to this user.
    """
    existing = Path(os.path.realpath(path))
    while not existing.exists():
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    # Some network file systems report no size at all; that says nothing about their space.
    if usage.total and usage.free < nbytes:
        raise SpaceError(
            f"{path}: needs {nbytes:,} bytes, {usage.free:,} are available on the file system of {existing}; "
            "free some or choose another place"
        )


def _recover_locked(places: _Places, *, is_ours: bool) -> Recovery:
    if os.path.lexists(places.old) and not os.path.lexists(places.target):
        places.old.rename(places.target)
        _sync_directory(places.target.parent)
        _remove_tree(places.swap)
        return Recovery.RESTORED
    if os.path.lexists(places.old) and not is_ours:
        # A killed publication leaves its lock file behind; without one, somebody else made this directory.
        return Recovery.LEFT
    return Recovery.REMOVED if _clear(places) else Recovery.NOTHING


def _settle_for_target(places: _Places, error: OSError) -> Recovery:
    if os.path.lexists(places.target) or not os.path.lexists(places.old):
        return Recovery.LEFT
    raise TargetError(
        f"{places.target}: a replacement was interrupted and the previous checkpoint is at {places.old}, "
        f"but it cannot be renamed back ({error.strerror}); rename it yourself"
    ) from error


def _clear(places: _Places) -> bool:
    """Remove the previous set; rename it first, because half of it must never be restored."""
    found = os.path.lexists(places.old) or os.path.lexists(places.swap)
    _remove_tree(places.swap)
    if os.path.lexists(places.old):
        places.old.rename(places.swap)
        _remove_tree(places.swap)
    return found


def _replace_target(places: _Places) -> None:
    if os.path.lexists(places.old):
        raise TargetError(f"{places.old}: is in the way and was not written here; move it elsewhere")
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


def _undo_replace(places: _Places, new: os.stat_result) -> None:
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


def _make_parents(directory: Path) -> None:
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _check_target(target: Path, *, replace: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise TargetError(f"{target}: is a file, expected a directory or nothing; choose another target")
    if not replace:
        raise TargetError(f"{target}: already exists; remove it, choose another target or ask to replace it")
    if target.is_mount():
        raise TargetError(f"{target}: is a mount point, which cannot be replaced; choose a directory in it")


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(directory: Path) -> None:
    for parent, _, names in os.walk(directory, topdown=False):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                _sync_file(path)
        _sync_directory(Path(parent))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    try:
        _sync_file(path)
    except OSError as error:
        # Some network file systems have no fsync for directories; they order renames themselves.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise


@contextmanager
def _translated(path: Path, failure: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        message = f"{path}: {failure} ({error.strerror}: {error.filename})"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise SpaceError(f"{message}; free some space and try again") from error
        if error.errno == errno.EIO:
            raise SaveError(f"{message}; the storage reports an error") from error
        raise TargetError(f"{message}; check the permissions, or choose another target") from error
