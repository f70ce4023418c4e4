"""What users of the class that this one replaces rely on, with doubles as they use them.

The Checkpointer, the meshes and the rank are doubles here, because the subject is which
calls the manager makes. What the real ones do with them is for the other test files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
from ckpt_core.manager import AutomodelCheckpointManager, _infer_checkpoint_root, detect_checkpoint_format


@pytest.fixture(autouse=True)
def _rank_three() -> Iterator[None]:
    with patch("torch.distributed.get_rank", return_value=3):
        yield


@pytest.fixture
def manager() -> AutomodelCheckpointManager:
    return AutomodelCheckpointManager(MagicMock(), MagicMock())


@pytest.fixture
def double(manager: AutomodelCheckpointManager) -> MagicMock:
    """A Checkpointer that only remembers how it was called."""
    with patch("ckpt_core.manager.Checkpointer") as create:
        manager.init_checkpointer()
    checkpointer = create.return_value
    assert isinstance(checkpointer, MagicMock)
    return checkpointer


def test_the_meshes_and_keys_are_kept_and_nothing_is_created() -> None:
    dp, tp, moe = MagicMock(), MagicMock(), MagicMock()
    manager = AutomodelCheckpointManager(dp, tp, ["a.weight"], moe)
    assert (manager.dp_mesh, manager.tp_mesh, manager.moe_mesh) == (dp, tp, moe)
    assert manager.model_state_dict_keys == ["a.weight"]
    assert manager.checkpointer is None
    assert manager.checkpoint_config is None


def test_ranks_are_those_of_the_groups_of_the_meshes(manager: AutomodelCheckpointManager) -> None:
    ranks = {manager.dp_mesh.get_group(): 5, manager.tp_mesh.get_group(): 7}
    with patch("torch.distributed.get_rank", side_effect=ranks.__getitem__):
        assert (manager._get_dp_rank(), manager._get_tp_rank()) == (5, 7)


def test_init_constructs_the_checkpointer_once_with_ranks_and_config(manager: AutomodelCheckpointManager) -> None:
    manager.set_model_state_dict_keys(["a.weight"])
    with patch("ckpt_core.manager.Checkpointer") as create:
        manager.init_checkpointer({"model_repo_id": "org/model"}, "/runs/one")
        manager.init_checkpointer({"model_repo_id": "org/other"}, "/runs/two")
    create.assert_called_once()
    options = create.call_args.kwargs
    assert (options["dp_rank"], options["tp_rank"], options["pp_rank"], options["moe_mesh"]) == (3, 3, 0, None)
    assert options["config"] is manager.checkpoint_config
    assert options["config"].model_repo_id == "org/model"
    assert str(options["config"].checkpoint_dir) == "/runs/one"
    assert options["config"].model_state_dict_keys == ["a.weight"]
    assert manager.checkpointer is create.return_value


def test_init_defaults_are_safetensors_and_nothing_else(manager: AutomodelCheckpointManager) -> None:
    with patch("ckpt_core.manager.Checkpointer"):
        manager.init_checkpointer()
    config = manager.checkpoint_config
    assert config.enabled
    assert config.model_save_format.value == "safetensors"
    assert config.save_consolidated.value == "false"
    assert (config.is_peft, config.is_async, config.dequantize_base_checkpoint) == (False, False, False)


def test_init_leaves_an_existing_checkpointer_alone(manager: AutomodelCheckpointManager) -> None:
    existing = manager.checkpointer = MagicMock()
    with patch("ckpt_core.manager.Checkpointer") as create:
        manager.init_checkpointer({"is_peft": True})
    create.assert_not_called()
    assert manager.checkpointer is existing


def test_updates_act_on_the_config_of_the_checkpointer(manager: AutomodelCheckpointManager) -> None:
    manager.checkpointer = MagicMock()
    manager.update_checkpointer_config({"is_peft": True, "model_save_format": "torch_save"}, "/new/root")
    config = manager.checkpointer.config
    assert config.checkpoint_dir == "/new/root"
    assert config.is_peft is True
    assert config.model_save_format.value == "torch_save"


def test_updates_without_a_checkpointer_do_nothing(manager: AutomodelCheckpointManager) -> None:
    manager.update_checkpointer_config({"is_peft": True}, "/new/root")
    manager._rebuild_checkpointer_addons()
    assert manager.checkpointer is None


@pytest.mark.parametrize(
    ("save_format", "is_peft", "addons"),
    [
        ("safetensors", False, ["ConsolidatedHFAddon"]),
        ("safetensors", True, ["PeftAddon"]),
        ("torch_save", False, []),
    ],
)
def test_addons_follow_the_config(
    manager: AutomodelCheckpointManager, double: MagicMock, save_format: str, is_peft: bool, addons: list[str]
) -> None:
    double.config = manager.checkpoint_config
    manager.update_checkpointer_config({"model_save_format": save_format, "is_peft": is_peft})
    assert [type(addon).__name__ for addon in double._addons] == addons


def test_keys_can_be_set_before_and_after_init(manager: AutomodelCheckpointManager) -> None:
    manager.set_model_state_dict_keys(["a"])
    assert manager.model_state_dict_keys == ["a"]
    manager.checkpointer = MagicMock()
    manager.set_model_state_dict_keys(["b"])
    assert manager.model_state_dict_keys == ["b"]
    assert manager.checkpointer.config.model_state_dict_keys == ["b"]


def test_save_load_and_base_load_need_a_checkpointer(manager: AutomodelCheckpointManager) -> None:
    expected = "Checkpointer must be initialized before"
    with pytest.raises(AssertionError, match=expected):
        manager.save_checkpoint(MagicMock(), "/w", checkpointing_cfg={"enabled": True})
    with pytest.raises(AssertionError, match=expected):
        manager.load_checkpoint(MagicMock(), "/w")
    with pytest.raises(AssertionError, match=expected):
        manager.load_base_model(MagicMock(), "org/model")


def test_save_needs_a_checkpointing_cfg(manager: AutomodelCheckpointManager) -> None:
    manager.checkpointer = MagicMock()
    with pytest.raises(ValueError, match="checkpointing_cfg must be provided when saving checkpoint"):
        manager.save_checkpoint(MagicMock(), "/w")


def test_saving_a_model_alone(manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path) -> None:
    model, weights = torch.nn.Linear(2, 2), str(tmp_path / "weights")
    manager.save_checkpoint(model, weights, checkpointing_cfg={"enabled": True, "save_period": 10})
    double.save_model.assert_called_once_with(model=model, weights_path=weights, peft_config=None, tokenizer=None)
    double.save_optimizer.assert_not_called()


def test_an_optimizer_is_saved_only_with_its_path(
    manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer, scheduler = torch.optim.Adam(model.parameters()), MagicMock()
    config = {"model_save_format": "torch_save", "is_peft": True}
    weights, optim = str(tmp_path / "weights"), str(tmp_path / "optimizer")
    manager.save_checkpoint(model, weights, optimizer=optimizer, checkpointing_cfg=config)
    double.save_optimizer.assert_not_called()
    manager.save_checkpoint(model, weights, optimizer, optim, scheduler, checkpointing_cfg=config)
    double.save_optimizer.assert_called_once_with(
        optimizer=optimizer, model=model, weights_path=optim, scheduler=scheduler
    )


def test_a_tokenizer_goes_to_its_path_or_beside_the_weights(
    manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path
) -> None:
    tokenizer, beside = MagicMock(), MagicMock()
    with patch("torch.distributed.get_rank", return_value=0):
        manager.save_checkpoint(
            MagicMock(), str(tmp_path), tokenizer=tokenizer, tokenizer_path="/t", checkpointing_cfg={}
        )
    tokenizer.save_pretrained.assert_called_once_with("/t")
    manager.save_checkpoint(MagicMock(), str(tmp_path), tokenizer=beside, checkpointing_cfg={})
    assert [call.kwargs["tokenizer"] for call in double.save_model.call_args_list] == [None, beside]
    beside.save_pretrained.assert_not_called()


def test_lora_is_saved_with_its_configuration(
    manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path
) -> None:
    peft = MagicMock()
    manager.save_checkpoint(MagicMock(), str(tmp_path), checkpointing_cfg={}, lora_enabled=True, peft_config=peft)
    assert double.save_model.call_args.kwargs["peft_config"] is peft
    assert double.config.is_peft is True
    manager.save_checkpoint(MagicMock(), str(tmp_path), checkpointing_cfg={"is_peft": True, "peft_config": peft})
    assert double.save_model.call_args.kwargs["peft_config"] is peft


@pytest.mark.parametrize("ending", ["", "/", "/model", "/model/"])
def test_loading_reads_the_model_directory_and_configures_by_what_is_there(
    manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path, ending: str
) -> None:
    directory = tmp_path / "weights" / "model"
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").touch()
    model, optimizer, scheduler = MagicMock(), MagicMock(), MagicMock()
    manager.load_checkpoint(model, f"{tmp_path / 'weights'}{ending}", optimizer, str(tmp_path / "o"), scheduler)
    double.load_model.assert_called_once_with(model=model, model_path=str(directory))
    double.load_optimizer.assert_called_once_with(
        optimizer=optimizer, model=model, weights_path=str(tmp_path / "o"), scheduler=scheduler
    )
    assert double.config.model_save_format.value == "torch_save"
    assert double.config.is_peft is False
    assert double.config.dequantize_base_checkpoint is False
    assert double.config.checkpoint_dir == str(tmp_path)


def test_an_optimizer_is_loaded_only_with_its_path(
    manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path
) -> None:
    manager.load_checkpoint(MagicMock(), str(tmp_path), optimizer=MagicMock())
    double.load_optimizer.assert_not_called()


def test_a_base_model_is_loaded_from_where_it_was_found(
    manager: AutomodelCheckpointManager, double: MagicMock, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    manager.load_base_model(model, str(tmp_path), hf_cache_dir="/cache", dequantize_base_checkpoint=True)
    call = double.load_base_model.call_args
    assert call.args == (model,)
    assert call.kwargs["device"] == torch.device("cpu")
    assert (call.kwargs["root_dir"], call.kwargs["model_name"]) == ("/cache", str(tmp_path))
    assert double.config.model_repo_id == str(tmp_path)
    assert double.config.dequantize_base_checkpoint is True


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], ("safetensors", False)),
        (["model/model.safetensors"], ("safetensors", False)),
        (["model/rank_0/model-00001-of-00002.safetensors"], ("safetensors", False)),
        (["model/checkpoint.distcp"], ("torch_save", False)),
        (["model/pytorch_model.bin"], ("torch_save", False)),
        (["model/model.pt"], ("torch_save", False)),
        (["model/adapter_model.safetensors"], ("safetensors", True)),
        (["model/adapter_config.json", "model/model.safetensors"], ("safetensors", True)),
    ],
)
def test_the_format_is_told_by_names(tmp_path: Path, files: list[str], expected: tuple[str, bool]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert detect_checkpoint_format(str(tmp_path)) == expected


def test_the_format_of_nothing_is_safetensors(tmp_path: Path) -> None:
    assert detect_checkpoint_format(str(tmp_path / "absent")) == ("safetensors", False)


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/run/step_1/weights/model", "/run/step_1"),
        ("/run/step_1/weights", "/run/step_1"),
        ("/run/step_1/weights/", "/run/step_1"),
        ("/run/step_1/custom", "/run/step_1"),
        ("/run/step_1/custom/model", "/run/step_1/custom"),
        ("/run/my_weights/model", "/run/my_weights"),
        ("step_1/weights/model", "step_1"),
        ("weights/model", ""),
    ],
)
def test_the_root_is_above_the_weights(path: str, root: str) -> None:
    assert _infer_checkpoint_root(path) == root
