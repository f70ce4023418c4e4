from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from ckpt_convert import byte_copy
from ckpt_convert.byte_copy import Position, copy_bytes, read_bytes, write_bytes
from ckpt_convert.copy_tensors import open_file

CONTENT = bytes(range(256)) * 400
REFUSALS = [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM]


def copy_part(folder: Path, *, source_offset: int, target_offset: int, length: int) -> tuple[bytes, list[int]]:
    (folder / "source").write_bytes(CONTENT)
    (folder / "target").write_bytes(bytes(target_offset))
    steps: list[int] = []
    with open_file(folder / "source", os.O_RDONLY) as source, open_file(folder / "target", os.O_WRONLY) as target:
        copied = copy_bytes(Position(source, source_offset), Position(target, target_offset), length, steps.append)
    assert copied == sum(steps)
    return (folder / "target").read_bytes()[target_offset:], steps


@pytest.mark.parametrize("code", [None, *REFUSALS])
def test_bytes_arrive_where_the_kernel_copies_ranges_and_where_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    if code is not None:

        def refuse(*_: object, **__: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(byte_copy, "STEP", 30_000)
    monkeypatch.setattr(byte_copy, "_BLOCK", 7_000)
    copied, steps = copy_part(tmp_path, source_offset=11, target_offset=5, length=100_000)
    assert copied == CONTENT[11:100_011]
    assert max(steps) <= 30_000


def test_systems_without_copy_file_range_copy_through_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    assert copy_part(tmp_path, source_offset=1, target_offset=0, length=99)[0] == CONTENT[1:100]


def test_an_error_of_the_storage_is_not_taken_for_a_missing_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(OSError, match="Input/output error"):
        copy_part(tmp_path, source_offset=0, target_offset=0, length=10)


@pytest.mark.parametrize("through_buffer", [False, True])
def test_a_source_that_ends_early_gives_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, through_buffer: bool
) -> None:
    if through_buffer:
        monkeypatch.delattr(os, "copy_file_range")
    assert copy_part(tmp_path, source_offset=400, target_offset=0, length=len(CONTENT))[0] == CONTENT[400:]


def test_reads_and_writes_go_on_after_a_short_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1000]], offset))
    buffer = bytearray(len(CONTENT) + 10)
    with open_file(tmp_path / "file", os.O_RDWR | os.O_CREAT) as file:
        write_bytes(file, 3, CONTENT)
        assert read_bytes(file, 3, memoryview(buffer)) == len(CONTENT)
    assert buffer[: len(CONTENT)] == CONTENT
