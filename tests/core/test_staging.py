from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from ckpt_core import publication
from ckpt_core.errors import CheckpointError, SaveError, SpaceError, TargetError
from ckpt_core.publication import Recovery
from ckpt_core.record import CheckpointRecord, write_record
from ckpt_core.staging import Stage, open_stage, recover, require_free_space, require_writable, stage_directory
from testbed.file_sets import NEW, OLD, list_names, publish_set, read_set, write_set

NAMES = ["model", "with space", "größe-模型", ".hidden", "trailing.partial", "new\nline"]


@pytest.fixture(params=["exchange", "renames"])
def _exchange_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "renames":
        monkeypatch.setattr(publication, "_exchange", lambda _one, _other: False)


# --- publishing ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_published_directory_stands_alone(tmp_path: Path, name: str) -> None:
    publish_set(tmp_path / name, NEW)
    assert read_set(tmp_path / name) == NEW
    assert list_names(tmp_path) == {name}


@pytest.mark.usefixtures("_exchange_mode")
@pytest.mark.parametrize("name", NAMES)
def test_replacing_leaves_only_the_new_set(tmp_path: Path, name: str) -> None:
    write_set(tmp_path / name, OLD)
    publish_set(tmp_path / name, NEW, replace=True)
    assert read_set(tmp_path / name) == NEW
    assert list_names(tmp_path) == {name}


def test_this_file_system_exchanges_directories(tmp_path: Path) -> None:
    """The tests above mean to cover both ways; without support both would take the second."""
    write_set(tmp_path / "one", OLD)
    write_set(tmp_path / "other", NEW)
    assert publication._exchange(tmp_path / "one", tmp_path / "other")
    assert (read_set(tmp_path / "one"), read_set(tmp_path / "other")) == (NEW, OLD)


def test_nothing_shows_at_the_target_before_publishing(tmp_path: Path) -> None:
    with stage_directory(tmp_path / "model") as stage:
        write_set(stage.path, NEW)
        assert not stage.target.exists()
        assert stage.path == tmp_path / ".model.partial"


def test_missing_parents_are_created(tmp_path: Path) -> None:
    publish_set(tmp_path / "a" / "b" / "model", NEW)
    assert read_set(tmp_path / "a/b/model") == NEW


@pytest.mark.parametrize("given", ["model", "model/", "./model", "x/../model", "model//"])
def test_relative_paths_survive_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stage = open_stage(Path(given))
    monkeypatch.chdir("elsewhere")
    write_set(stage.path, NEW)
    stage.publish()
    assert read_set(tmp_path / "model") == NEW
    assert list_names(tmp_path) == {"model", "x", "elsewhere"}


@pytest.mark.usefixtures("_exchange_mode")
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    write_set(tmp_path / "disk" / "real", OLD)
    (tmp_path / "link").symlink_to("disk/real")
    publish_set(tmp_path / "link", NEW, replace=True)
    assert (tmp_path / "link").readlink() == Path("disk/real")
    assert read_set(tmp_path / "disk/real") == NEW
    assert list_names(tmp_path / "disk") == {"real"}
    assert list_names(tmp_path) == {"link", "disk"}


def test_a_dangling_link_gets_its_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    publish_set(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink()
    assert read_set(tmp_path / "real") == NEW


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_modes_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with stage_directory(tmp_path / "model") as stage:
            write_record(stage.path, CheckpointRecord("1", {}, {}))
            stage.publish()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "model" / "ckpt_record.json").stat().st_mode) == mode & 0o666


def test_links_inside_the_stage_are_published_as_links(tmp_path: Path) -> None:
    with stage_directory(tmp_path / "model") as stage:
        (stage.path / "nowhere").symlink_to("absent")
        stage.publish()
    assert (tmp_path / "model" / "nowhere").readlink() == Path("absent")


# --- what is refused -------------------------------------------------------------------------


def test_an_existing_target_is_refused_and_untouched(tmp_path: Path) -> None:
    write_set(tmp_path / "model", OLD)
    with pytest.raises(TargetError, match="already exists; remove it, choose another target"):
        open_stage(tmp_path / "model")
    assert read_set(tmp_path / "model") == OLD
    assert list_names(tmp_path) == {"model"}


def test_a_file_at_the_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"a file")
    with pytest.raises(TargetError, match="is a file, expected a directory or nothing"):
        open_stage(tmp_path / "model", replace=True)
    assert (tmp_path / "model").read_bytes() == b"a file"


def test_a_file_where_a_parent_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TargetError, match="cannot be written"):
        open_stage(tmp_path / "file" / "model")


def test_a_mount_point_is_refused() -> None:
    with pytest.raises(TargetError, match="is a mount point"):
        open_stage(Path("/proc"), replace=True)


def test_the_root_is_refused() -> None:
    with pytest.raises(TargetError, match="root of a file system"):
        open_stage(Path("/"), replace=True)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(TargetError):
        open_stage(tmp_path / "a", replace=True)


def test_a_name_too_long_to_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="File name too long"):
        open_stage(tmp_path / ("n" * 250))
    assert list_names(tmp_path) == set()


def test_a_target_that_appears_while_writing_is_not_replaced(tmp_path: Path) -> None:
    stage = open_stage(tmp_path / "model")
    write_set(tmp_path / "model", OLD)
    with pytest.raises(TargetError, match="appeared while it was being written"):
        stage.publish()
    stage.discard()
    assert read_set(tmp_path / "model") == OLD
    assert list_names(tmp_path) == {"model"}


@pytest.mark.usefixtures("_exchange_mode")
@pytest.mark.parametrize("name", [".model.old", ".model.swap"])
def test_a_name_that_is_taken_while_writing_is_not_cleared(tmp_path: Path, name: str) -> None:
    write_set(tmp_path / "model", OLD)
    stage = open_stage(tmp_path / "model", replace=True)
    (tmp_path / name).mkdir()  # an empty directory would give way to a rename
    for refuse in (stage.check_publishable, stage.publish):
        with pytest.raises(TargetError, match="is in the way and was not written here"):
            refuse()
    stage.discard()
    assert list_names(tmp_path) == {"model", name}  # no lock file, which would make it pass for ours
    assert read_set(tmp_path / "model") == OLD


@contextmanager
def make_unwritable(sets: dict[str, dict[str, bytes]]) -> Iterator[Path]:
    """Yield a directory that holds `sets` and that this process cannot write, even when it is root."""
    directory = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    directory.chmod(0o755)
    for name, files in sets.items():
        write_set(directory / name, files)
    directory.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield directory
    finally:
        if is_root:
            os.seteuid(0)
        directory.chmod(0o755)
        shutil.rmtree(directory)


@pytest.mark.parametrize(("name", "replace"), [("fresh", False), ("model", True), ("a/b", False)])
def test_a_parent_that_cannot_be_written_is_refused(name: str, *, replace: bool) -> None:
    with (
        make_unwritable({"model": OLD}) as parent,
        pytest.raises(TargetError, match=r"cannot be written \(Permission denied"),
    ):
        open_stage(parent / name, replace=replace)


@pytest.mark.parametrize(("name", "replace"), [("fresh", False), ("model", True), ("a/b", False)])
def test_what_a_stage_needs_is_known_without_making_anything(name: str, *, replace: bool) -> None:
    with make_unwritable({"model": OLD}) as parent, pytest.raises(TargetError, match="Permission denied"):
        require_writable(parent / name, replace=replace)
    with pytest.raises(TargetError, match="is a mount point"):
        require_writable(Path("/proc"), replace=True)


def test_a_target_that_can_be_written_is_left_alone_by_the_check(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b")
    assert list_names(tmp_path) == set()


def test_a_finished_stage_cannot_be_used_again(tmp_path: Path) -> None:
    stage = open_stage(tmp_path / "model")
    stage.publish()
    assert (stage.is_open, stage.is_published) == (False, True)
    for use in (stage.publish, stage.keep, stage.discard):
        with pytest.raises(SaveError, match="already published, kept or discarded"):
            use()


# --- leaving without publishing --------------------------------------------------------------


def leave_by(error: BaseException, target: Path, *, keep_on: tuple[type[BaseException], ...] = ()) -> None:
    with stage_directory(target, replace=True, keep_on=keep_on) as stage:
        write_set(stage.path, NEW)
        raise error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_removes_the_stage_and_spares_the_old_set(tmp_path: Path, error: BaseException) -> None:
    write_set(tmp_path / "model", OLD)
    with pytest.raises(type(error)):
        leave_by(error, tmp_path / "model")
    assert read_set(tmp_path / "model") == OLD
    assert list_names(tmp_path) == {"model"}


def test_a_kept_stage_is_resumed_with_what_it_held(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        leave_by(KeyboardInterrupt(), tmp_path / "model", keep_on=(KeyboardInterrupt,))
    assert list_names(tmp_path) == {".model.partial", ".model.lock"}
    with stage_directory(tmp_path / "model", resume=True) as stage:
        assert read_set(stage.path) == NEW
        stage.publish()
    assert read_set(tmp_path / "model") == NEW


def test_a_fresh_start_removes_a_kept_stage(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        leave_by(KeyboardInterrupt(), tmp_path / "model", keep_on=(KeyboardInterrupt,))
    with stage_directory(tmp_path / "model") as stage:
        assert read_set(stage.path) == {}


def test_keep_on_does_not_keep_after_other_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"):
        leave_by(ValueError("x"), tmp_path / "model", keep_on=(KeyboardInterrupt,))
    assert list_names(tmp_path) == set()


def test_a_block_that_does_not_publish_leaves_nothing(tmp_path: Path) -> None:
    with stage_directory(tmp_path / "model") as stage:
        write_set(stage.path, NEW)
    assert list_names(tmp_path) == set()


# --- failing renames -------------------------------------------------------------------------


def fail_at_rename(nth: int, number: int, *, times: int = 1) -> Callable[[Path, Path], Path]:
    """Rename as usual until the n-th call; that one and `times` in all fail with errno `number`."""
    calls = count(1)
    real = Path.rename

    def rename(source: Path, destination: Path) -> Path:
        if nth <= next(calls) < nth + times:
            raise OSError(number, os.strerror(number), str(source))
        return real(source, destination)

    return rename


@pytest.mark.usefixtures("_exchange_mode")
@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EXDEV, TargetError), (errno.EACCES, TargetError), (errno.ENOSPC, SpaceError), (errno.EIO, SaveError)],
)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_rename_never_loses_the_old_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, number: int, error: type[CheckpointError]
) -> None:
    write_set(tmp_path / "model", OLD)
    stage = open_stage(tmp_path / "model", replace=True)
    write_set(stage.path, NEW)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_at_rename(nth, number))
        try:
            stage.publish()
        except error:
            assert read_set(tmp_path / "model") == OLD
            assert read_set(stage.path) == NEW
            assert stage.is_open
        else:
            # Fewer renames were needed, or only the removal of the old set was left to do.
            assert read_set(tmp_path / "model") == NEW
    if stage.is_open:
        stage.publish()
    assert recover(tmp_path / "model") in {Recovery.NOTHING, Recovery.LEFT}
    assert read_set(tmp_path / "model") == NEW
    # Whatever was left, the next writer knows it for ours and removes it.
    publish_set(tmp_path / "model", OLD, replace=True)
    assert list_names(tmp_path) == {"model"}


@pytest.mark.usefixtures("_exchange_mode")
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_file_system_that_stops_renaming_never_loses_the_old_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Not even going back works; the next command finds what is left."""
    write_set(tmp_path / "model", OLD)
    stage = open_stage(tmp_path / "model", replace=True)
    write_set(stage.path, NEW)
    with monkeypatch.context() as patch, suppress(TargetError):
        patch.setattr(Path, "rename", fail_at_rename(nth, errno.EACCES, times=100))
        stage.publish()
    is_published = stage.is_published
    if stage.is_open:
        stage.discard()
    recover(tmp_path / "model")
    assert read_set(tmp_path / "model") == (NEW if is_published else OLD)


@pytest.mark.usefixtures("_exchange_mode")
def test_every_file_and_directory_is_flushed_before_the_first_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path / "model", OLD)
    stage = open_stage(tmp_path / "model", replace=True)
    write_set(stage.path, NEW)
    staged = [stage.path, *stage.path.rglob("*")]
    expected = {path.stat().st_ino for path in staged}
    events: list[int | str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    def rename(source: Path, destination: Path) -> Path:
        events.append("rename")
        return real_rename(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "rename", rename)
        stage.publish()
    assert set(events[: events.index("rename")]) == expected
    # The renames themselves become durable with the directory that they happened in.
    assert tmp_path.stat().st_ino in events[events.index("rename") :]


@pytest.mark.usefixtures("_exchange_mode")
@pytest.mark.parametrize("name", ["old", "swap", "partial"])
@pytest.mark.parametrize("resume", [True, False])
def test_what_somebody_else_has_under_a_name_beside_the_target_stays(
    tmp_path: Path, name: str, *, resume: bool
) -> None:
    write_set(tmp_path / "model", OLD)
    write_set(tmp_path / f".model.{name}", {"mine": b"not written here"})
    assert recover(tmp_path / "model") is Recovery.LEFT
    for _ in range(2):  # a refusal must not make it pass for ours
        with pytest.raises(TargetError, match=rf"\.model\.{name}: is in the way and was not written here"):
            open_stage(tmp_path / "model", replace=True, resume=resume)
    assert read_set(tmp_path / f".model.{name}") == {"mine": b"not written here"}
    assert read_set(tmp_path / "model") == OLD
    assert list_names(tmp_path) == {"model", f".model.{name}"}


@pytest.mark.parametrize("there", [("model",), ()])
@pytest.mark.parametrize("beside", ["old", "swap", "partial"])
def test_recovering_for_a_reader_removes_nothing(tmp_path: Path, there: tuple[str, ...], beside: str) -> None:
    for number, name in enumerate({*there, ".model.old", f".model.{beside}"}):
        write_set(tmp_path / name, {"file": b"content %d" % number})
    (tmp_path / ".model.lock").write_bytes(b"")
    before = {content for content in read_set(tmp_path).values() if content}
    recover(tmp_path / "model")
    assert before <= set(read_set(tmp_path).values())
    assert (tmp_path / "model").is_dir()


@pytest.mark.usefixtures("_exchange_mode")
@pytest.mark.parametrize("mode", [0o750, 0o2775, 0o700])
def test_a_replacement_keeps_mode_and_owner(tmp_path: Path, mode: int) -> None:
    write_set(tmp_path / "model", OLD)
    if os.geteuid() == 0:
        os.chown(tmp_path / "model", 12, 34)
    (tmp_path / "model").chmod(mode)
    before = (tmp_path / "model").stat()
    publish_set(tmp_path / "model", NEW, replace=True)
    after = (tmp_path / "model").stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert read_set(tmp_path / "model") == NEW


# --- full disks ------------------------------------------------------------------------------

ROOM = 64 * 1024


@pytest.fixture
def small_directory(tmp_path: Path) -> Iterator[Path]:
    """A directory that cannot take `ROOM` bytes more: a tiny file system, or a limit without the right to mount."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(directory)]
    if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:  # noqa: S603  a literal command
        yield directory
        subprocess.run(["umount", str(directory)], check=True)  # noqa: S603, S607  a literal command
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM - 1, before[1]))
    yield directory
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def overfill(target: Path) -> None:
    with stage_directory(target, replace=True) as stage:
        (stage.path / "a.bin").write_bytes(b"x" * ROOM)


def test_a_full_disk_while_staging_spares_the_old_set(small_directory: Path) -> None:
    write_set(small_directory / "model", OLD)
    with pytest.raises(OSError, match=r"No space left|File too large"):
        overfill(small_directory / "model")
    assert read_set(small_directory / "model") == OLD
    assert list_names(small_directory) == {"model"}


def test_a_record_that_does_not_fit_is_a_space_error(small_directory: Path) -> None:
    record = CheckpointRecord("1", {f"file-{n:05d}": n for n in range(ROOM // 8)}, {})
    with pytest.raises(SpaceError, match=r"ckpt_record.json: cannot be written .*free some space"):
        write_record(small_directory, record)


def test_free_space_is_compared_with_what_is_needed(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_free_space(tmp_path / "not" / "there", free // 2)
    with pytest.raises(SpaceError, match=rf"needs {free * 2:,} bytes, [\d,]+ are available"):
        require_free_space(tmp_path / "not" / "there", free * 2)


def test_an_interrupt_after_the_new_set_is_in_place_is_a_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_path: Path) -> None:
        raise KeyboardInterrupt

    write_set(tmp_path / "model", OLD)
    stage = open_stage(tmp_path / "model", replace=True)
    write_set(stage.path, NEW)
    with monkeypatch.context() as patch:
        patch.setattr(publication, "remove_tree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stage.publish()
    assert_published(stage)
    assert recover(tmp_path / "model") is Recovery.LEFT
    assert list_names(tmp_path) == {"model", ".model.swap", ".model.lock"}
    publish_set(tmp_path / "model", OLD, replace=True)
    assert list_names(tmp_path) == {"model"}


def assert_published(stage: Stage) -> None:
    assert stage.is_published
    assert not stage.is_open
    assert read_set(stage.target) == NEW


def test_a_writer_that_may_not_replace_finds_the_restored_set_in_its_way(tmp_path: Path) -> None:
    write_set(tmp_path / ".model.old", OLD)
    with pytest.raises(TargetError, match="already exists"):
        open_stage(tmp_path / "model")
    assert read_set(tmp_path / "model") == OLD
    assert list_names(tmp_path) == {"model"}


def test_recovering_where_nothing_happened_does_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path / "absent") is Recovery.NOTHING
    write_set(tmp_path / "model", OLD)
    assert recover(tmp_path / "model") is Recovery.NOTHING
    assert list_names(tmp_path) == {"model"}


def test_recovering_beside_a_writer_waits_for_it(tmp_path: Path) -> None:
    write_set(tmp_path / "model", OLD)
    stage = open_stage(tmp_path / "model", replace=True)
    write_set(tmp_path / ".model.swap", NEW)
    assert recover(tmp_path / "model") is Recovery.LEFT
    assert list_names(tmp_path) == {"model", ".model.swap", ".model.partial", ".model.lock"}
    stage.discard()


def test_recovering_where_nothing_may_be_written_is_quiet_while_the_target_is_there() -> None:
    with make_unwritable({"model": OLD, ".model.swap": NEW}) as parent:
        assert recover(parent / "model") is Recovery.LEFT


def test_recovering_where_nothing_may_be_written_names_the_old_set() -> None:
    expected = r"previous checkpoint is at .*\.model\.old.*rename it yourself"
    with make_unwritable({".model.old": OLD}) as parent, pytest.raises(TargetError, match=expected):
        recover(parent / "model")
