"""A save that is killed, or fails on one rank, leaves the old checkpoint or the new one, never a mix."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed.launcher import RankLauncher
from testbed.rank import RankContext
from testbed.values import Failed, Kill, MeshShape, Place

pytestmark = pytest.mark.distributed

MESH = MeshShape(dp=2)
FORMATS = ["torch_save", "safetensors", "consolidated"]
POINTS = 5
"""Kills per case, spread over all writes of the first victim."""


KILLS = [
    ((0,), "torch_save"),
    ((1,), "consolidated"),
    ((0, 1), "consolidated"),
    ((1, 0), "torch_save"),
]
"""Who dies, the first one deciding when, and in which format's save."""


def save_first(context: RankContext, place: Place) -> None:
    from testbed.crashes import save_old

    save_old(context, place)


def save_second(context: RankContext, place: Place, kill: Kill) -> int:
    from testbed.crashes import save_new

    return save_new(context, place, kill)


def load_any(context: RankContext, place: Place) -> str:
    from testbed.crashes import identify_state

    return identify_state(context, place)


def fail_writing(context: RankContext, place: Place, culprit: int, limit: int) -> Failed:
    from testbed.crashes import fail_to_write

    return fail_to_write(context, place, culprit, limit)


def fail_reading(context: RankContext, place: Place, culprit: int) -> Failed:
    from testbed.crashes import fail_to_read

    return fail_to_read(context, place, culprit)


def load_surplus(context: RankContext, place: Place, culprit: int) -> Failed:
    from testbed.crashes import load_with_odd_rank

    return load_with_odd_rank(context, place, culprit)


def save_wrong_keys(context: RankContext, place: Place) -> Failed:
    from testbed.crashes import save_with_wrong_keys

    return save_with_wrong_keys(context, place)


def save_unplannable(context: RankContext, place: Place) -> Failed:
    from testbed.crashes import fail_to_plan

    return fail_to_plan(context, place)


@pytest.fixture(scope="module")
def first_saves(launcher: RankLauncher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    """A run that was saved once, by format."""
    saves = {name: Place("odd", MESH, name, tmp_path_factory.mktemp(name)) for name in FORMATS}
    for place in saves.values():
        launcher.run(save_first, place, ranks=MESH.ranks)
    return saves


@dataclass(frozen=True, slots=True)
class SaveCopies:
    """Copies of the first saves, to be damaged."""

    saves: dict[str, Place]
    directory: Path

    def make(self, format_name: str, name: str = "copy") -> Place:
        root = shutil.copytree(self.saves[format_name].root, self.directory / name)
        return dataclasses.replace(self.saves[format_name], root=Path(root))


@pytest.fixture
def copies(first_saves: dict[str, Place], tmp_path: Path) -> SaveCopies:
    return SaveCopies(first_saves, tmp_path)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_save_replaces_the_one_that_stood_there(launcher: RankLauncher, copies: SaveCopies, format_name: str) -> None:
    place = copies.make(format_name)
    assert launcher.run(load_any, place, ranks=MESH.ranks) == ["old", "old"]
    launcher.run(save_second, place, Kill(), ranks=MESH.ranks)
    assert launcher.run(load_any, place, ranks=MESH.ranks) == ["new", "new"]


@pytest.mark.parametrize(("victims", "format_name"), KILLS)
def test_a_kill_in_a_save_leaves_all_of_the_old_state_or_all_of_the_new(
    launcher: RankLauncher, copies: SaveCopies, victims: tuple[int, ...], format_name: str
) -> None:
    writes = launcher.run(save_second, copies.make(format_name), Kill(), ranks=MESH.ranks)[victims[0]]
    states = set()
    for at in _spread_points(writes):
        place = copies.make(format_name, f"killed-at-{at}")
        outcomes = launcher.launch(save_second, place, Kill(victims, at), ranks=MESH.ranks, grace=0.5)
        assert {outcomes[victim].error for victim in victims} == {"killed by SIGKILL"}
        state, *others = launcher.run(load_any, place, ranks=MESH.ranks)
        assert state in {"old", "new"}, f"killed at write {at} of {writes}"
        assert others == [state]
        states.add(state)
    assert "old" in states


def _spread_points(writes: int) -> list[int]:
    """Return the first and the last write, and some between."""
    return sorted({1 + round(point * (writes - 1) / (POINTS - 1)) for point in range(POINTS)})


@pytest.mark.parametrize(
    ("format_name", "limit"),
    # The first file; a file that only one rank writes; a file of the optimizer, when the model's are complete.
    [("torch_save", 64), ("safetensors", 64), ("consolidated", 1_000), ("consolidated", 30_000)],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_the_save_on_all_and_keeps_the_old_checkpoint(
    launcher: RankLauncher, copies: SaveCopies, format_name: str, limit: int, culprit: int
) -> None:
    place = copies.make(format_name)
    first, *others = launcher.run(fail_writing, place, culprit, limit, ranks=MESH.ranks, timeout=60.0)
    assert first.error == "SaveError"
    assert f"rank {culprit}" in first.message
    assert str(place.root) in first.message
    assert first.changes == []
    assert others == [first]
    assert launcher.run(load_any, place, ranks=MESH.ranks) == ["old", "old"]


@pytest.mark.parametrize("format_name", ["torch_save", "safetensors"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_read_that_fails_on_one_rank_fails_the_load_on_all(
    launcher: RankLauncher, copies: SaveCopies, format_name: str, culprit: int
) -> None:
    reports = launcher.run(fail_reading, copies.make(format_name), culprit, ranks=MESH.ranks, timeout=60.0)
    assert {report.error for report in reports} != {"nothing"}
    assert len({(report.error, report.message) for report in reports}) == 1
    for report in reports:
        assert f"rank {culprit}" in report.message
        assert report.changes == [] or "partly changed" in report.message


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_model_that_differs_on_one_rank_fails_the_load_on_all_and_changes_nothing(
    launcher: RankLauncher, copies: SaveCopies, culprit: int
) -> None:
    first, *others = launcher.run(load_surplus, copies.make("torch_save"), culprit, ranks=MESH.ranks)
    assert first.error == "KeyMismatchError"
    assert "surplus" in first.message
    assert f"rank {culprit}" in first.message
    assert first.changes == []
    assert others == [first]


def test_wrong_keys_fail_the_save_on_all_ranks_and_keep_the_old_checkpoint(
    launcher: RankLauncher, copies: SaveCopies
) -> None:
    place = copies.make("torch_save")
    first, *others = launcher.run(save_wrong_keys, place, ranks=MESH.ranks)
    assert first.error == "KeyMismatchError"
    assert "head.absent" in first.message
    assert others == [first]
    assert launcher.run(load_any, place, ranks=MESH.ranks) == ["old", "old"]


def test_a_dimension_that_tp_and_dp_shard_unevenly_is_refused_before_anything_is_written(
    launcher: RankLauncher, tmp_path: Path
) -> None:
    place = Place("uneven_twice", MeshShape(dp=3, tp=2), "torch_save", tmp_path)
    first, *others = launcher.run(save_unplannable, place, ranks=place.mesh.ranks)
    assert first.error == "SaveError"
    assert "0.weight" in first.message
    assert others == [first] * 5
    assert not list(tmp_path.rglob("*.distcp"))
