"""What is decided, and refused, before anything is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_convert import plan_conversion
from ckpt_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    LayoutError,
    TargetError,
)
from safetensors.torch import save_file
from testbed.file_sets import give_up_root
from testbed.sharded import save_dcp, save_sharded_safetensors
from testbed.tensors import make_tensor

STATE = {f"layers.{i}.w": make_tensor(torch.float32, (8, 4), i) for i in range(3)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", STATE, ranks=2)


def list_entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_plan_is_a_frozen_value_and_the_same_input_gives_the_same_plan(source: Path, tmp_path: Path) -> None:
    plan = plan_conversion(source, tmp_path / "out")
    assert plan == plan_conversion(source, tmp_path / "out")
    assert plan != plan_conversion(source, tmp_path / "elsewhere")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.target = tmp_path  # type: ignore[misc]
    assert list_entries(tmp_path) == ["dcp"]


def test_a_plan_prints_files_sizes_tensors_disk_and_memory(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{}")
    text = str(plan_conversion(source, tmp_path / "out", max_shard_size=300))
    assert f"{source} (dcp)\n-> {tmp_path / 'out'} (safetensors)\n" in text
    for i, count in ((1, 2), (2, 1)):
        assert f"model-0000{i}-of-00002.safetensors" in text
        assert f"  {count} tensors" in text
    for part in ("model.safetensors.index.json", "copied beside: config.json", "disk needed: ", "memory: at most 64"):
        assert part in text


def test_a_plan_is_json(source: Path, tmp_path: Path) -> None:
    plan = plan_conversion(source, tmp_path / "out", max_shard_size=300)
    content = json.loads(json.dumps(plan.to_json()))
    assert content["tensors"] == 3
    assert content["tensor_bytes"] == plan.nbytes == 3 * 128
    assert content["files"] == {file.name: file.size for file in plan.files}
    assert content["left_out"]["objects"] == []


def test_the_disk_that_is_needed_holds_all_that_is_written(source: Path, tmp_path: Path) -> None:
    from ckpt_convert import execute_plan  # noqa: PLC0415  the only test here that writes

    (source / "config.json").write_text("{}" * 100)
    plan = plan_conversion(source, tmp_path / "out", max_shard_size=300)
    execute_plan(plan)
    written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert written <= plan.disk_needed <= written + 1000


@pytest.mark.parametrize(
    "level", ["", "policy", "policy/weights", "policy/weights/model", "policy/weights/model/.metadata"]
)
def test_the_source_is_found_from_every_level(tmp_path: Path, level: str) -> None:
    save_dcp(tmp_path / "step_3/policy/weights/model", STATE)
    (tmp_path / "step_3/policy/tokenizer").mkdir()
    (tmp_path / "step_3/policy/tokenizer/tokenizer.json").write_text("{}")
    plan = plan_conversion(tmp_path / "step_3" / level, tmp_path / "out")
    assert plan.source == tmp_path / "step_3/policy/weights/model"
    assert [asset.name for asset in plan.assets] == ["tokenizer.json"]


def test_a_single_safetensors_file_is_a_source(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "weights.safetensors")
    plan = plan_conversion(tmp_path / "weights.safetensors", tmp_path / "out")
    assert (plan.source_layout, plan.tensor_count) == ("safetensors", 1)


def test_several_candidates_are_listed_and_none_is_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"run/step_{step}", STATE)
    with pytest.raises(LayoutError, match=r"expected one checkpoint, found 2(.|\n)*step_1(.|\n)*step_2"):
        plan_conversion(tmp_path / "run", tmp_path / "out")


def test_every_damage_is_in_one_refusal(source: Path, tmp_path: Path) -> None:
    (source / "__0_0.distcp").unlink()
    short = source / "__1_0.distcp"
    short.write_bytes(short.read_bytes()[:-500])
    with pytest.raises(
        CorruptCheckpointError, match=f"{source}: expected a complete dcp checkpoint, found 2"
    ) as caught:
        plan_conversion(source, tmp_path / "out")
    assert {(p.kind, p.where) for p in caught.value.problems} == {
        ("missing_file", "__0_0.distcp"),
        ("short_file", "__1_0.distcp"),
    }
    assert list_entries(tmp_path) == ["dcp"]


def test_a_missing_rank_of_sharded_safetensors_is_refused(tmp_path: Path) -> None:
    source = save_sharded_safetensors(tmp_path / "sharded", STATE, ranks=4)
    sorted(source.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CorruptCheckpointError) as caught:
        plan_conversion(source, tmp_path / "out")
    assert caught.value.problems
    assert list_entries(tmp_path) == ["sharded"]


def test_a_stray_shard_is_a_warning_of_the_plan(source: Path, tmp_path: Path) -> None:
    (source / "__7_0.distcp").write_bytes(b"left by more ranks")
    plan = plan_conversion(source, tmp_path / "out")
    assert any("__7_0.distcp" in warning for warning in plan.warnings)
    assert "warning: __7_0.distcp" in str(plan)


def test_optimizer_state_alone_is_refused_with_an_explanation(tmp_path: Path) -> None:
    state = {"optim": {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}}
    save_dcp(tmp_path / "optim", state)
    with pytest.raises(LayoutError, match=r"optim: expected the tensors of a model, found none \(.*optim\.state\.w"):
        plan_conversion(tmp_path / "optim", tmp_path / "out")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    with pytest.raises(LayoutError, match="found an adapter"):
        plan_conversion(tmp_path, tmp_path.parent / "out")


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    state = {"fine": torch.ones(2, dtype=torch.complex64), "wide": torch.ones(2, dtype=torch.complex128)}
    save_dcp(tmp_path / "dcp", state)
    with pytest.raises(ConfigError, match="wide: dtype C128 is none that safetensors can hold") as caught:
        plan_conversion(tmp_path / "dcp", tmp_path / "out")
    assert [problem.where for problem in caught.value.problems] == ["wide"]
    assert list_entries(tmp_path) == ["dcp"]


@pytest.mark.parametrize("directory", ["dcp", "dcp/out", "."])
def test_a_target_in_or_around_the_source_is_refused(source: Path, tmp_path: Path, directory: str) -> None:
    with pytest.raises(TargetError, match=r"choose (another target|a target outside)"):
        plan_conversion(source, tmp_path / directory, overwrite=True)


def test_impossible_options_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target layout 'zip': expected 'safetensors'"):
        plan_conversion(source, tmp_path / "out", to="zip")
    with pytest.raises(ConfigError, match="max_shard_size 0: expected at least 1 byte"):
        plan_conversion(source, tmp_path / "out", max_shard_size=0)


@pytest.mark.parametrize("options", [{"to": 5}, {"max_shard_size": 2.5}, {"assets": 3}, {"dst": None}, {"src": 1}])
def test_options_of_another_type_are_refused(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        plan_conversion(**{"src": source, "dst": tmp_path / "out"} | options)


def test_a_size_may_be_a_text(source: Path, tmp_path: Path) -> None:
    by_text, by_number = (plan_conversion(source, tmp_path / "out", max_shard_size=size) for size in ("300B", 300))
    assert by_text == by_number


def test_a_target_that_cannot_be_written_is_refused_in_the_plan() -> None:
    with give_up_root() as directory:
        save_file({"w": torch.ones(2)}, directory / "model.safetensors")
        (directory / "closed").mkdir(mode=0o500)
        with pytest.raises(TargetError, match=r"cannot be written \(Permission denied"):
            plan_conversion(directory / "model.safetensors", directory / "closed" / "out")


def test_nothing_at_the_source_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="absent"):
        plan_conversion(tmp_path / "absent", tmp_path / "out")
