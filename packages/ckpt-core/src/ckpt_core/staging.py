"""Write a directory beside its target, then publish it whole.

`open_stage` locks the target and makes an empty directory beside it; `Stage.publish` makes
that directory durable and puts it in the target's place. `ckpt_core.publication` has the
names and the renames. `recover` undoes what a kill left in the way of reading.

There are no collectives here. In a process group one rank stages and publishes, the others
write into `Stage.path`, and the caller provides the barriers between.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_core.errors import LockHeldError, SaveError, SpaceError, TargetError, translate_os_errors
from ckpt_core.file_lock import FileLock
from ckpt_core.publication import (
    Places,
    Recovery,
    clear_leftovers,
    clear_previous,
    make_parents,
    remove_tree,
    replace_target,
    require_free_names,
    restore_previous,
    sync_directory,
    sync_tree,
)


class Stage:
    """A directory that is being written, and the lock that keeps other writers away.

    Ends with exactly one of `publish`, `keep` or `discard`.
    """

    def __init__(self, places: Places, lock: FileLock, *, replace: bool) -> None:
        """Take over a created stage; use `open_stage`."""
        self._places = places
        self._lock = lock
        self._replace = replace
        self._is_published = False
        self._has_set_aside = False

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
        with translate_os_errors(self.path, "cannot be made durable"):
            sync_tree(self.path)

    def check_publishable(self) -> None:
        """Refuse what `publish` would, as far as it can be told without renaming anything.

        Raises:
            TargetError: The target may not be replaced, or something is in the way.
        """
        self._require_open()
        with translate_os_errors(self.target, "cannot be published"):
            _check_target(self.target, replace=self._replace)
            require_free_names(self._places)

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
        with translate_os_errors(self.target, "cannot be published"):
            self._put_at_target()
        self._is_published = True
        try:
            with translate_os_errors(self.target, "is published, but its directory cannot be made durable"):
                sync_directory(self.target.parent)
            # What is left of the old set now is cleared by the next command.
            with suppress(OSError):
                clear_previous(self._places)
        finally:
            self._release()

    def _put_at_target(self) -> None:
        places = self._places
        if not os.path.lexists(places.target):
            places.partial.rename(places.target)
        elif self._replace:
            require_free_names(places)
            self._has_set_aside = True
            replace_target(places)
        else:
            raise TargetError(f"{places.target}: appeared while it was being written; nothing was replaced")

    def keep(self) -> None:
        """Leave the stage where it is, so that `open_stage(..., resume=True)` finds it."""
        self._require_open()
        self._release()

    def discard(self) -> None:
        """Remove the stage; the target is untouched."""
        self._require_open()
        with translate_os_errors(self.path, "cannot be removed"):
            remove_tree(self.path)
        self._release()

    def _release(self) -> None:
        """Give the lock up, but leave its file beside anything that the next writer has to clear."""
        places = self._places
        ours = places.leftovers if self._has_set_aside else (places.partial,)
        self._lock.release(keep_file=any(map(os.path.lexists, ours)))

    def _require_open(self) -> None:
        if not self.is_open:
            raise SaveError(f"{self.path}: this stage is already published, kept or discarded; open a new one")


def open_stage(target: Path, *, replace: bool = False, resume: bool = False) -> Stage:
    """Lock `target` against other writers and create the directory that will become it.

    Missing parents are created. What an earlier, killed writer left is recovered first, and
    removed if its lock file is there too.

    Args:
        target: Directory to write. If it is a link, what it points to is written.
        replace: Whether a directory that stands at the target may be replaced.
        resume: Keep what a leftover stage holds instead of starting from nothing.

    Raises:
        TargetError: The target is taken, a file, a mount point or locked by another writer,
            a name beside it is taken, or its parent cannot be written.
    """
    places = Places.beside(target)
    # Before anything is made, and again once a recovery may have brought the old set back.
    require_writable(target, replace=replace)
    with translate_os_errors(places.target, "cannot be written"):
        make_parents(places.target.parent)
        lock = FileLock.acquire(places.lock)
        is_ours = not lock.is_new
        try:
            restore_previous(places)
            _check_target(places.target, replace=replace)
            clear_leftovers(places, is_ours=is_ours, keep_stage=resume)
            is_ours = True
            places.partial.mkdir(exist_ok=resume)
        except BaseException:
            # The file would make what is somebody else's pass for ours.
            lock.release(keep_file=is_ours and bool(places.leftovers))
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
    """Undo what a killed publication to `target` left in the way; call before reading it.

    The previous set is put back where the target is absent. Nothing is ever removed: that is
    for the next writer. While another one publishes, nothing is done.

    Raises:
        TargetError: The target is absent and the previous set cannot be put back.
    """
    places = Places.beside(target)
    if os.path.lexists(places.target) or not os.path.lexists(places.old):
        return Recovery.LEFT if places.leftovers else Recovery.NOTHING
    try:
        lock = FileLock.acquire(places.lock)
    except LockHeldError:
        return Recovery.LEFT
    except OSError as error:
        return _settle_for_target(places, error)
    try:
        return restore_previous(places)
    except OSError as error:
        return _settle_for_target(places, error)
    finally:
        lock.release(keep_file=not lock.is_new and bool(places.leftovers))


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


def require_writable(target: Path, *, replace: bool = False) -> None:
    """Refuse a target that `open_stage` would refuse; makes nothing.

    Args:
        target: As for `open_stage`.
        replace: As for `open_stage`.

    Raises:
        TargetError: The target is taken, a file or a mount point, or what is above it cannot
            be written.
    """
    places = Places.beside(target)
    with translate_os_errors(places.target, "cannot be written"):
        _check_target(places.target, replace=replace)
        existing = places.target.parent
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
        if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
            read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number), str(existing))
        with suppress(FileNotFoundError):
            places.partial.lstat()  # a name that is too long


def _settle_for_target(places: Places, error: OSError) -> Recovery:
    if os.path.lexists(places.target) or not os.path.lexists(places.old):
        return Recovery.LEFT
    raise TargetError(
        f"{places.target}: a replacement was interrupted and the previous checkpoint is at {places.old}, "
        f"but it cannot be renamed back ({error.strerror}); rename it yourself"
    ) from error


def _check_target(target: Path, *, replace: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise TargetError(f"{target}: is a file, expected a directory or nothing; choose another target")
    if not replace:
        raise TargetError(f"{target}: already exists; remove it, choose another target or ask to replace it")
    if target.is_mount():
        raise TargetError(f"{target}: is a mount point, which cannot be replaced; choose a directory in it")
