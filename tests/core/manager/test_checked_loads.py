"""A load is checked completely before a parameter changes."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    KeyMismatchError,
    LoadError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from testbed.single_rank import (
    FORMATS,
    Odd,
    Trained,
    assert_same,
    build_llama,
    build_lora,
    drop_file,
    load,
    save,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.compat


def _cut_file(model: Path) -> None:
    path = next(p for p in model.iterdir() if p.suffix in {".distcp", ".safetensors"})
    path.write_bytes(path.read_bytes()[:-9])


def _damage_header(model: Path) -> None:
    """Leave every size as it is, and make the description of one tensor unreadable."""
    path = next(p for p in model.iterdir() if p.suffix in {".distcp", ".safetensors"})
    content = bytearray(path.read_bytes())
    start = content.index(b"data.pkl") + 8 if path.suffix == ".distcp" else 8
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)


def _empty_directory(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


@pytest.mark.parametrize("part", ["weights/model", "optimizer/optim"])
@pytest.mark.parametrize("damage", [drop_file, _cut_file, _damage_header, _empty_directory, shutil.rmtree])
@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_08_damage_is_found_before_anything_changes(
    manager: AutomodelCheckpointManager, tmp_path: Path, save_format: str, damage: Callable[[Path], None], part: str
) -> None:
    save(manager, Trained(1), tmp_path, model_save_format=save_format)
    damage(tmp_path / part)
    target = Trained(2)
    before = target.state()
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / part))):
        load(manager, target, tmp_path)
    assert_same(target.state(), before)


def test_requirement_08_a_model_on_meta_is_refused(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    manager.save_checkpoint(Odd(), str(tmp_path / "w"), checkpointing_cfg={})
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(ConfigError, match="meta device"):
        manager.load_checkpoint(model, str(tmp_path / "w"))
    with pytest.raises(ConfigError, match="meta device"):
        manager.save_checkpoint(model, str(tmp_path / "v"), checkpointing_cfg={})


def test_requirement_08_groups_that_one_group_cannot_hold_are_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    source, target = Trained(1), Trained(2)

    def group(trained: Trained, *rates: float) -> None:
        parameters = list(trained.model.parameters())
        halves = [parameters[:2], parameters[2:]] if len(rates) > 1 else [parameters]
        trained.optimizer = torch.optim.AdamW(
            [{"params": half, "lr": rate} for half, rate in zip(halves, rates, strict=True)]
        )
        trained.scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, step_size=2)
        trained.step()

    def load() -> None:
        manager.load_checkpoint(target.model, str(tmp_path / "w"), target.optimizer, str(tmp_path / "o"))

    group(source, 0.1, 0.2)
    manager.save_checkpoint(
        source.model, str(tmp_path / "w"), source.optimizer, str(tmp_path / "o"), checkpointing_cfg={}
    )
    group(target, 0.3)
    before = target.state()
    with pytest.raises(KeyMismatchError, match=r"\.lr: stored 0\.2, but 0\.1"):
        load()
    assert_same(target.state(), before)
    group(target, 0.3, 0.4)
    load()
    assert [g["lr"] for g in target.optimizer.param_groups] == [0.1, 0.2]


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_taken(
    manager: AutomodelCheckpointManager, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(manager, Trained(1), tmp_path)
    other = AutomodelCheckpointManager(mesh, mesh)
    other.init_checkpointer()
    load_optimizer = manager.checkpointer.load_optimizer

    def save_and_load(**options: Any) -> None:  # noqa: ANN401
        save(other, Trained(2), tmp_path)
        load_optimizer(**options)

    monkeypatch.setattr(manager.checkpointer, "load_optimizer", save_and_load)
    with pytest.raises(LoadError, match="replaced by another save"):
        load(manager, Trained(3), tmp_path)


class _Renamed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.deep
        del self.deep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.other(self.wide(x)) * self.scale
        return result


class _Reshaped(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(5, 4, bias=False)


class _Narrowed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.deep.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.deep(self.wide(x).bfloat16()).float() * self.scale
        return result


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_Renamed, ["missing tensor (1)", "other.weight", "unexpected tensor (1)", "deep.weight"]),
        (_Reshaped, ["deep.weight", "(4, 5)", "(3, 5)"]),
        (_Narrowed, ["deep.weight", "F32", "BF16"]),
        (build_lora, ["missing tensor (2)", "wide.lora_A.weight"]),
    ],
)
@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_08_another_model_is_refused_before_anything_changes(
    manager: AutomodelCheckpointManager,
    tmp_path: Path,
    save_format: str,
    build: Callable[[], nn.Module],
    words: list[str],
) -> None:
    save(manager, Trained(1), tmp_path, model_save_format=save_format)
    target = Trained(2, build)
    before = target.state()
    with pytest.raises(KeyMismatchError) as caught:
        manager.load_checkpoint(target.model, str(tmp_path / "weights"))
    assert all(word in str(caught.value) for word in words)
    assert_same(target.state(), before)


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_wider_dtype_is_filled_exactly(manager: AutomodelCheckpointManager, tmp_path: Path, save_format: str) -> None:
    source, target = Trained(1, _Narrowed), Trained(2)
    save(manager, source, tmp_path, model_save_format=save_format)
    manager.load_checkpoint(target.model, str(tmp_path / "weights"))
    assert_same(target.model.state_dict()["deep.weight"], source.model.state_dict()["deep.weight"].float())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "optimizer", torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)),
        lambda t: setattr(t, "scheduler", torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, T_max=9)),
        lambda t: setattr(t, "optimizer", torch.optim.AdamW(t.model.wide.parameters())),
    ],
)
def test_requirement_08_another_optimizer_is_refused_before_the_weights_change(
    manager: AutomodelCheckpointManager, tmp_path: Path, change: Callable[[Trained], None]
) -> None:
    save(manager, Trained(1), tmp_path)
    target = Trained(2, steps=0)
    change(target)
    before = target.state()
    with pytest.raises(KeyMismatchError, match="optimizer"):
        load(manager, target, tmp_path)
    assert_same(target.state(), before)


@pytest.mark.parametrize("stored_as_tensor", [True, False])
def test_requirement_08_a_tensor_is_not_loaded_for_a_number_nor_the_reverse(
    manager: AutomodelCheckpointManager, tmp_path: Path, stored_as_tensor: bool
) -> None:
    source, target = Trained(1), Trained(2)
    changed = source if stored_as_tensor else target
    for group in changed.optimizer.param_groups:
        group["lr"] = torch.tensor(0.01)
    manager.save_checkpoint(
        source.model, str(tmp_path / "weights"), source.optimizer, str(tmp_path / "optimizer"), checkpointing_cfg={}
    )
    before = target.state()
    with pytest.raises(KeyMismatchError, match=r"\.lr: expected .*stored as"):
        manager.load_checkpoint(target.model, str(tmp_path / "weights"), target.optimizer, str(tmp_path / "optimizer"))
    assert_same(target.state(), before)


def test_requirement_08_a_refused_load_leaves_a_partly_stepped_optimizer_alone(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    save(manager, Trained(1), tmp_path)
    target = Trained(2, _Renamed, steps=0)
    target.model.wide(torch.ones(7)).sum().backward()  # type: ignore[operator]
    target.optimizer.step()
    before = target.state()
    assert 0 < len(before["optim"]["state"]) < len(list(target.model.parameters()))
    with pytest.raises(KeyMismatchError):
        load(manager, target, tmp_path)
    assert_same(target.state(), before)


def test_parts_of_two_saves_are_refused(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    first, second = Trained(1), Trained(2)
    save(manager, first, tmp_path)
    manager.save_checkpoint(second.model, str(tmp_path / "weights"), checkpointing_cfg={})
    target = Trained(3)
    with pytest.raises(CorruptCheckpointError, match=r"weights/model.*optimizer/optim"):
        load(manager, target, tmp_path)
    manager.load_checkpoint(target.model, str(tmp_path / "weights"))
    assert_same(target.model.state_dict(), second.model.state_dict())


class _Expanded(nn.Module):
    """All elements of the parameter are one in memory, which nothing can be loaded into."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(1).expand(4))


def test_requirement_11_a_failure_inside_dcp_is_an_exception_with_its_cause(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(_Expanded(), str(tmp_path / "w"), checkpointing_cfg={"model_save_format": "torch_save"})
    with pytest.raises(LoadError, match=r"rank 0: .*may be partly changed: RuntimeError") as caught:
        manager.load_checkpoint(_Expanded(), str(tmp_path / "w"))
    assert isinstance(caught.value, RuntimeError)
    assert str(tmp_path) in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "CheckpointException"


def test_a_stored_head_that_differs_is_not_lost_in_a_tied_model(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(build_llama(seed=1), str(tmp_path / "w"), checkpointing_cfg={})
    target = build_llama(tied=True, seed=2)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(KeyMismatchError, match=r"lm_head\.weight.*embed_tokens"):
        manager.load_checkpoint(target, str(tmp_path / "w"))
    assert_same(target.state_dict(), before)
