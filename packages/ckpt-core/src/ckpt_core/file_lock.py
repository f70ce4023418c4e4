"""One writer at a time, across processes and, where the file system can, across machines.

The lock is `flock` on a file, which the kernel drops when its holder dies. On a file system
without `flock` the existence of the file is the lock; after a kill it has to be deleted by
hand, because nobody can know there whether the holder still runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

from ckpt_core.errors import LockHeldError

_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


class FileLock:
    """An exclusive lock that is held from `acquire` until `release`."""

    def __init__(self, path: Path, descriptor: int, *, is_new: bool) -> None:
        """Take over an open, locked file; use `acquire`."""
        self._path = path
        self._descriptor: int | None = descriptor
        self.is_new = is_new
        """False if the file was there before: its last holder did not release it."""

    @property
    def is_held(self) -> bool:
        """Whether `release` has not been called yet."""
        return self._descriptor is not None

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """Take the lock at `path` without waiting.

        Raises:
            LockHeldError: Somebody else holds it; the message says who and what to do.
            OSError: The file cannot be created or opened.
        """
        while True:
            descriptor, is_new = _open_lock_file(path)
            try:
                _lock(path, descriptor, is_new=is_new)
                # The last holder may have removed the file between our opening and locking it.
                if _is_same_file(path, descriptor):
                    _write_holder(descriptor)
                    return cls(path, descriptor, is_new=is_new)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self, *, keep_file: bool = False) -> None:
        """Let the next writer in; does nothing the second time.

        Args:
            keep_file: Leave the file, which tells the next holder that there is something of
                ours to clear up. Without locks in the file system it has to be deleted by hand.
        """
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            if not keep_file:
                self._path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _open_lock_file(path: Path) -> tuple[int, bool]:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            pass
        try:
            return os.open(path, os.O_RDWR), False
        except FileNotFoundError:
            continue


def _lock(path: Path, descriptor: int, *, is_new: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockHeldError(f"{path}: {_describe_holder(path)} is writing here; wait for it or stop it") from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not is_new:
            raise LockHeldError(
                f"{path}: {_describe_holder(path)} is writing here, or was killed; this file system has no locks, "
                "so make sure that it is gone and delete the file"
            ) from error


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    # Only for the message that another writer gets: a full disk must not stop a recovery.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _describe_holder(path: Path) -> str:
    try:
        holder = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        holder = ""
    return holder if holder.isprintable() and holder else "another process"
