from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, LayoutError
from ckpt_core.layout import (
    CheckpointLayout,
    DetectedLayout,
    _infer_checkpoint_root,
    detect_checkpoint_format,
    detect_layout,
)
from ckpt_core.reader import open_checkpoint
from safetensors.torch import save_file
from testbed.file_sets import give_up_root
from testbed.sharded import save_dcp, save_sharded_safetensors

DCP, SAFETENSORS, SHARDED, ADAPTER, TORCH = CheckpointLayout


def make_dcp(path: Path) -> Path:
    return save_dcp(path, {"w": torch.ones(4, 2)}, ranks=2)


def make_sharded(path: Path) -> Path:
    return save_sharded_safetensors(path, {"w": torch.ones(4, 2)}, ranks=2)


def make_safetensors(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(4, 2)}, path / "model.safetensors")
    return path


def make_adapter(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(4, 2)}, path / "adapter_model.safetensors")
    touch(path, "adapter_config.json")
    return path


def touch(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("make", "layout"),
    [(make_dcp, DCP), (make_sharded, SHARDED), (make_safetensors, SAFETENSORS), (make_adapter, ADAPTER)],
)
def test_a_layout_is_found_from_every_level_of_a_step(tmp_path: Path, make: object, layout: CheckpointLayout) -> None:
    assert callable(make)
    model = make(tmp_path / "step_7" / "policy" / "weights" / "model")
    make_dcp(tmp_path / "step_7" / "policy" / "optimizer" / "optim")
    touch(tmp_path / "step_7", "config.yaml", "training_info.json", "policy/tokenizer/tokenizer.json", "x/y.pt.txt")
    for level in (model, *list(model.parents)[:4]):
        assert detect_layout(level) == DetectedLayout(layout, model)


def test_a_dcp_directly_in_weights_is_found(tmp_path: Path) -> None:
    weights = make_dcp(tmp_path / "step_1" / "policy" / "weights")
    assert detect_layout(tmp_path / "step_1") == DetectedLayout(DCP, weights)


def test_a_consolidated_copy_is_taken_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    model = make_sharded(tmp_path / "epoch_0_step_9" / "model")
    copy = make_safetensors(model / "consolidated")
    touch(model, ".hf_metadata/config.json", "consolidate.sh")
    assert detect_layout(tmp_path / "epoch_0_step_9") == DetectedLayout(SHARDED, model)
    for shard in model.glob("shard-*"):
        shard.unlink()
    assert detect_layout(tmp_path / "epoch_0_step_9") == DetectedLayout(SAFETENSORS, copy)


def test_an_optimizer_is_opened_when_it_is_named(tmp_path: Path) -> None:
    optim = make_dcp(tmp_path / "policy" / "optimizer" / "optim")
    assert detect_layout(tmp_path / "policy" / "optimizer").path == optim
    with pytest.raises(LayoutError, match="found none"):
        detect_layout(tmp_path / "policy")


def test_accelerate_and_lightning_directories_are_found(tmp_path: Path) -> None:
    model = make_dcp(tmp_path / "a" / "pytorch_model_fsdp_0")
    make_dcp(tmp_path / "a" / "optimizer_0")
    touch(tmp_path / "a", "random_states_0.pkl", "scheduler.bin")
    assert detect_layout(tmp_path / "a").path == model
    lightning = touch(make_dcp(tmp_path / "lightning"), "meta.pt")
    assert detect_layout(lightning) == DetectedLayout(DCP, lightning)


def test_a_snapshot_in_a_hub_cache_is_found_through_its_links(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    blob = make_safetensors(repo / "blobs") / "model.safetensors"
    blob.rename(repo / "blobs" / "abc123")
    snapshot = repo / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc123")
    assert detect_layout(repo) == DetectedLayout(SAFETENSORS, snapshot)


def test_a_link_to_the_latest_step_is_no_second_candidate(tmp_path: Path) -> None:
    step = make_dcp(tmp_path / "epoch_0_step_9" / "model")
    (tmp_path / "LATEST").symlink_to("epoch_0_step_9")
    assert detect_layout(tmp_path).path.resolve() == step.resolve()


def test_unfinished_and_hidden_directories_are_passed_over(tmp_path: Path) -> None:
    step = make_dcp(tmp_path / "step_1")
    make_dcp(tmp_path / "tmp_step_2")
    make_dcp(tmp_path / ".step_3.partial")
    assert detect_layout(tmp_path).path == step


def test_several_candidates_are_listed_and_none_is_taken(tmp_path: Path) -> None:
    for name in ("step_1", "step_2"):
        make_dcp(tmp_path / name / "policy" / "weights")
    with pytest.raises(LayoutError, match="found 2") as caught:
        detect_layout(tmp_path)
    for name in ("step_1", "step_2"):
        assert str(tmp_path / name / "policy" / "weights") in str(caught.value)


@pytest.mark.parametrize("second", [make_safetensors, make_sharded, make_adapter])
def test_two_layouts_side_by_side_are_refused(tmp_path: Path, second: object) -> None:
    assert callable(second)
    make_dcp(tmp_path / "m")
    second(tmp_path / "m")
    with pytest.raises(LayoutError, match="side by side"):
        detect_layout(tmp_path)


def test_an_adapter_beside_a_full_model_is_refused(tmp_path: Path) -> None:
    make_adapter(make_safetensors(tmp_path))
    with pytest.raises(LayoutError, match="safetensors"):
        detect_layout(tmp_path)


def test_an_index_counts_even_if_the_files_are_gone(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors.index.json")
    assert detect_layout(tmp_path) == DetectedLayout(SAFETENSORS, tmp_path)


def test_pickled_weights_count_only_where_there_is_nothing_better(tmp_path: Path) -> None:
    touch(tmp_path, "pytorch_model.bin")
    assert detect_layout(tmp_path) == DetectedLayout(TORCH, tmp_path)
    make_safetensors(tmp_path)
    assert detect_layout(tmp_path) == DetectedLayout(SAFETENSORS, tmp_path)


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"])
def test_state_of_a_trainer_is_no_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(LayoutError, match="found none"):
        detect_layout(touch(tmp_path, name))


@pytest.mark.parametrize(
    ("file", "layout", "is_file"),
    [
        (".metadata", DCP, False),
        ("__0_0.distcp", DCP, False),
        ("adapter_config.json", ADAPTER, False),
        ("adapter_model.safetensors", ADAPTER, False),
        ("model.safetensors.index.json", SAFETENSORS, False),
        ("model-00001-of-00002.safetensors", SAFETENSORS, True),
        ("pytorch_model.bin", TORCH, True),
        ("state.pt", TORCH, True),
    ],
)
def test_a_file_stands_for_its_checkpoint(tmp_path: Path, file: str, layout: CheckpointLayout, is_file: bool) -> None:
    touch(tmp_path, file)
    assert detect_layout(tmp_path / file) == DetectedLayout(layout, tmp_path / file if is_file else tmp_path)


def test_a_single_shard_is_told_from_a_whole_file(tmp_path: Path) -> None:
    shard = next(make_sharded(tmp_path).iterdir())
    assert detect_layout(shard) == DetectedLayout(SHARDED, shard)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], "verl.model_merger"),
        (["metadata.json", "common.pt", ".metadata", "__0_0.distcp"], "Megatron-Bridge"),
        (["latest_checkpointed_iteration.txt", "iter_1/mp_rank_00/model_optim_rng.pt"], "Megatron-Bridge"),
        (["iter_1/mp_rank_00_001/model_optim_rng.pt"], "Megatron-Bridge"),
        (["zero_to_fp32.py", "latest", "global_step1/mp_rank_00_model_states.pt"], "zero_to_fp32"),
        (["global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "zero_to_fp32"),
    ],
)
@pytest.mark.parametrize("above", [False, True])
def test_other_systems_are_answered_with_the_right_tool(
    tmp_path: Path,
    files: list[str],
    remedy: str,
    above: bool,
) -> None:
    touch(tmp_path / "x", *files)
    with pytest.raises(LayoutError, match=remedy):
        detect_layout(tmp_path if above else tmp_path / "x")


def test_data_without_metadata_is_an_unfinished_save(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"\.metadata beside the \.distcp"):
        detect_layout(touch(tmp_path, "__0_0.distcp"))


def test_metadata_of_each_rank_is_no_dcp(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="one per rank"):
        detect_layout(touch(tmp_path, "__0_0.distcp", "__1_0.distcp", "__0.metadata", "__1.metadata"))


@pytest.mark.parametrize("files", [[], ["README.md"], ["a/b/c/d.txt"]])
def test_a_directory_without_a_checkpoint_is_no_layout(tmp_path: Path, files: list[str]) -> None:
    with pytest.raises(LayoutError, match="found none"):
        detect_layout(touch(tmp_path, *files))


def test_other_paths_are_answered_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="found nothing"):
        detect_layout(tmp_path / "nowhere")
    with pytest.raises(LayoutError, match=r"notes\.txt"):
        detect_layout(touch(tmp_path, "notes.txt") / "notes.txt")
    with pytest.raises(LayoutError, match="too long"):
        detect_layout(tmp_path / ("x" * 300))


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to("..")
    with pytest.raises(LayoutError, match="found none"):
        detect_layout(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], ("safetensors", False)),
        (["a.distcp"], ("torch_save", False)),
        (["sub/deep/__0_0.distcp"], ("torch_save", False)),
        (["m.safetensors"], ("safetensors", False)),
        (["m.safetensors", "__0_0.distcp"], ("torch_save", False)),
        (["m.safetensors", "pytorch_model.bin"], ("safetensors", False)),
        (["pytorch_model.bin"], ("torch_save", False)),
        (["m.pt"], ("torch_save", False)),
        (["m.pth"], ("torch_save", False)),
        (["README.md", "x.safetensors.bak"], ("safetensors", False)),
        (["adapter_model.safetensors"], ("safetensors", True)),
        (["adapter_config.json", "model.safetensors"], ("safetensors", True)),
        (["adapter_model.bin"], ("torch_save", True)),
        (["sub/adapter_config.json"], ("safetensors", True)),
        (["optim/adapter_config.json"], ("safetensors", False)),
        (["consolidated/adapter_model.safetensors"], ("safetensors", False)),
        (["x/consolidated/y/adapter_model.safetensors"], ("safetensors", False)),
        (["my_adapter.safetensors", "adapter_notes.txt"], ("safetensors", False)),
    ],
)
def test_the_save_format_follows_from_names(tmp_path: Path, files: list[str], expected: tuple[str, bool]) -> None:
    touch(tmp_path, *files)
    assert detect_checkpoint_format(str(tmp_path)) == expected
    assert detect_checkpoint_format(tmp_path) == expected


def test_the_text_of_the_path_itself_does_not_count(tmp_path: Path) -> None:
    path = touch(tmp_path / "optim" / "adapter.distcp", "adapter_config.json")
    assert detect_checkpoint_format(f"{path}{os.sep}") == ("safetensors", True)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "", "a\0b", None, 5])
def test_the_save_format_of_nothing_is_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object
) -> None:
    monkeypatch.chdir(touch(tmp_path, "__0_0.distcp"))
    assert detect_checkpoint_format(path) == ("safetensors", False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/path/to/policy/weights/model", "/path/to/policy"),
        ("/path/to/policy/weights/model/", "/path/to/policy"),
        ("/path/to//policy/./weights/model", "/path/to/policy"),
        ("/path/to/policy/weights", "/path/to/policy"),
        ("/path/to/policy/weights/", "/path/to/policy"),
        ("/path/to/my_weights/model", "/path/to/my_weights"),
        ("/path/to/model", "/path/to"),
        ("weights/model", ""),
        ("model", ""),
        (Path("/p/weights/model"), "/p"),
    ],
)
def test_the_checkpoint_root_is_above_weights(path: str | Path, root: str) -> None:
    assert _infer_checkpoint_root(path) == root


def test_links_that_lead_back_are_not_followed_round_and_round(tmp_path: Path) -> None:
    make_safetensors(tmp_path / "a" / "model")
    for directory in (tmp_path, tmp_path / "a"):
        for number in range(30):
            (directory / f"l{number}").symlink_to(".")
    (tmp_path / "a" / "up").symlink_to("..")
    started = time.monotonic()
    assert detect_layout(tmp_path).path.resolve() == tmp_path / "a" / "model"
    assert time.monotonic() - started < 5


def test_a_directory_that_cannot_be_listed_is_an_error_that_names_it() -> None:
    with give_up_root() as directory:
        (directory / "run" / "closed").mkdir(parents=True)
        (directory / "run" / "closed").chmod(0o300)
        with pytest.raises(LayoutError, match=r"run/closed: cannot be looked into: Permission denied"):
            detect_layout(directory / "run")


def test_a_directory_whose_entries_cannot_be_opened_is_an_error_that_names_it() -> None:
    with give_up_root() as directory:
        make_safetensors(directory / "model")
        (directory / "model").chmod(0o600)
        with pytest.raises(CheckpointError, match=r"model.*Permission denied"):
            open_checkpoint(directory / "model")
