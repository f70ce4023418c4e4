"""A save replaces what stood there, whole, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ckpt_core import automodel_compat as compat
from ckpt_core.errors import (
    ConfigError,
    SaveError,
    TargetError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from testbed.single_rank import (
    FORMATS,
    Odd,
    Trained,
    assert_same,
    drop_file,
    load,
    save,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_requirement_09_a_save_replaces_what_was_there_and_nothing_beside_it(
    manager: AutomodelCheckpointManager, tmp_path: Path, first: str, second: str
) -> None:
    save(manager, Trained(1), tmp_path / "twice", model_save_format=first, save_consolidated=True)
    (tmp_path / "twice/weights/notes.txt").write_text("mine")
    save(manager, Trained(2), tmp_path / "twice", model_save_format=second)
    save(manager, Trained(2), tmp_path / "once", model_save_format=second)
    files = {p.relative_to(tmp_path / "twice") for p in (tmp_path / "twice").rglob("*") if p.is_file()}
    fresh = {p.relative_to(tmp_path / "once") for p in (tmp_path / "once").rglob("*") if p.is_file()}
    assert files == fresh | {Path("weights/notes.txt")}


@pytest.mark.parametrize("is_link", [False, True])
def test_no_file_names_the_place_where_it_was_staged(
    manager: AutomodelCheckpointManager, tmp_path: Path, is_link: bool
) -> None:
    if is_link:
        (tmp_path / "weights").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "weights/model").symlink_to(tmp_path / "elsewhere")
    save(manager, Trained(1), tmp_path)
    assert (tmp_path / "weights/model").is_symlink() is is_link
    script = (tmp_path / "weights/model/consolidate.sh").read_text()
    place = tmp_path / ("elsewhere" if is_link else "weights/model")
    assert f'"{place}"' in script
    assert f'"{place / "consolidated"}"' in script
    assert "partial" not in script
    assert (tmp_path / "weights/model/consolidate.sh").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("optimizer_path", "tokenizer_path"),
    [("a/model", None), ("a/model/inside", None), (None, "a/model"), (None, "a/model/tokenizer"), ("o", "o/optim")],
)
def test_a_part_inside_another_one_is_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path, optimizer_path: str | None, tokenizer_path: str | None
) -> None:
    trained = Trained(1)
    with pytest.raises(ConfigError, match="directory of its own"):
        manager.save_checkpoint(
            trained.model,
            str(tmp_path / "a"),
            trained.optimizer,
            str(tmp_path / optimizer_path) if optimizer_path else None,
            tokenizer=_tokenizer("a") if tokenizer_path else None,
            tokenizer_path=str(tmp_path / tokenizer_path) if tokenizer_path else None,
            checkpointing_cfg={},
        )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_stage_that_lost_a_file_is_not_published(
    manager: AutomodelCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_format: str
) -> None:
    source, target = Trained(1), Trained(3)
    save(manager, source, tmp_path, model_save_format=save_format)
    write = manager.checkpointer.save_model

    def write_and_lose(**options: Any) -> None:  # noqa: ANN401
        write(**options)
        drop_file(Path(options["weights_path"]) / "model")

    monkeypatch.setattr(manager.checkpointer, "save_model", write_and_lose)
    with pytest.raises(SaveError, match="nothing was published"):
        save(manager, Trained(2), tmp_path, model_save_format=save_format)
    load(manager, target, tmp_path)
    assert_same(target.state(), source.state())
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["model"]


def test_files_of_somebody_else_stay_in_a_directory_that_is_replaced(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    (tmp_path / "weights/model/src").mkdir(parents=True)
    (tmp_path / "weights/model/src/net.py").write_text("mine")
    (tmp_path / "weights/model/__7_0.distcp").write_text("stale")
    for _ in range(2):
        save(manager, Trained(1), tmp_path)
        assert (tmp_path / "weights/model/src/net.py").read_text() == "mine"
        assert not (tmp_path / "weights/model/__7_0.distcp").exists()


def test_a_tokenizer_that_has_no_place_is_said(
    manager: AutomodelCheckpointManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_save_format": "torch_save"}
    manager.save_checkpoint(Odd(), str(tmp_path), tokenizer=_tokenizer("a"), checkpointing_cfg=config)
    assert any("pass tokenizer_path" in record.message for record in caplog.records)


def test_what_is_in_the_way_is_found_before_the_first_part_is_replaced(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    source, target = Trained(1), Trained(3)
    save(manager, source, tmp_path)
    (tmp_path / "weights/.model.old").mkdir()
    with pytest.raises(TargetError, match=r"\.model\.old"):
        save(manager, Trained(2), tmp_path)
    load(manager, target, tmp_path)
    assert_same(target.state(), source.state())


def test_requirement_10_formats_alternate_in_one_process(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    for round_, save_format in enumerate(FORMATS * 2):
        source, target = Trained(round_), Trained(99)
        save(manager, source, tmp_path, model_save_format=save_format)
        load(manager, target, tmp_path)
        assert_same(target.state(), source.state())


def test_requirement_12_async_without_an_accelerator_is_refused_first(
    manager: AutomodelCheckpointManager, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "has_accelerator", lambda: False)
    with pytest.raises(ValueError, match="accelerator"):
        save(manager, Trained(1), tmp_path / "run", is_async=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="accelerator"):
        AutomodelCheckpointManager(mesh, mesh).init_checkpointer({"is_async": True})
    save(manager, Trained(1), tmp_path / "run")


@pytest.mark.parametrize("save_as", ["{}", "{}/", "{}/model", "{}/model/", "{}/./"])
@pytest.mark.parametrize("load_as", ["{}", "{}/model/"])
@pytest.mark.parametrize("name", ["weights", "my_weights", "models/model-1"])
def test_requirement_13_paths_mean_the_same_in_save_and_load(
    manager: AutomodelCheckpointManager, tmp_path: Path, name: str, save_as: str, load_as: str
) -> None:
    source, target = Odd(), Odd()
    base = tmp_path / name
    manager.save_checkpoint(source, save_as.format(base), checkpointing_cfg={})
    manager.load_checkpoint(target, load_as.format(base))
    assert_same(target.state_dict(), source.state_dict())


def test_requirement_13_path_objects_are_paths(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    source, target = Trained(1), Trained(2)
    path: Any = tmp_path / "here"
    manager.save_checkpoint(source.model, path, source.optimizer, path, checkpointing_cfg={})
    manager.load_checkpoint(target.model, path, target.optimizer, path)
    assert_same(target.model.state_dict(), source.model.state_dict())
    assert_same(target.optimizer.state_dict(), source.optimizer.state_dict())


def _tokenizer(*words: str) -> PreTrainedTokenizerFast:
    model = WordLevel({"[UNK]": 0} | {word: i for i, word in enumerate(words, 1)}, unk_token="[UNK]")  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[UNK]")  # noqa: S106


def test_requirement_14_a_tokenizer_replaces_its_own_files_and_no_others(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    place = tmp_path / "tokenizer"

    def save(*words: str) -> None:
        manager.save_checkpoint(
            Odd(),
            str(tmp_path / "weights"),
            tokenizer=_tokenizer(*words),
            tokenizer_path=str(place),
            checkpointing_cfg={},
        )

    save("one")
    save("one", "two")
    assert AutoTokenizer.from_pretrained(place)("two")["input_ids"] == [2]
    ids = [
        json.loads((path / "ckpt_record.json").read_text())["save_id"] for path in (place, tmp_path / "weights/model")
    ]
    assert ids[0] == ids[1]
    (place / "notes.txt").write_text("mine")
    stale = place / "vocab.json"
    stale.write_text("{}")
    record = json.loads((place / "ckpt_record.json").read_text())
    record["files"]["vocab.json"] = 2
    (place / "ckpt_record.json").write_text(json.dumps(record))
    save("one", "two", "three")
    assert not stale.exists()
    assert AutoTokenizer.from_pretrained(place)("three")["input_ids"] == [3]
    assert (place / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if "tokenizer" in path.name) == ["tokenizer"]


def test_a_tokenizer_without_a_place_goes_beside_the_weights(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(
        Odd(), str(tmp_path), tokenizer=_tokenizer("a", "b"), checkpointing_cfg={"save_consolidated": True}
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model/consolidated")("b")["input_ids"] == [2]
