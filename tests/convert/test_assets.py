from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_convert.assets import Asset, describe_missing, find_assets
from ckpt_core.errors import CheckpointNotFoundError, LayoutError
from testbed.file_sets import give_up_root

MODEL = ("config.json", "generation_config.json", "modeling_own.py")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt", "merges.txt")


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name}/{name}")


def list_sources(checkpoint: Path, assets_dir: Path | None = None) -> dict[str, str]:
    found = find_assets(checkpoint, assets_dir, exclude=frozenset())
    assert all(asset.size == asset.source.stat().st_size for asset in found)
    return {asset.name: asset.source.read_text() for asset in found}


def test_hf_metadata_is_taken_whole_but_for_what_describes_the_sources_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_files(
        model / ".hf_metadata",
        *MODEL,
        *TOKENIZER,
        "code/deep.py",
        "fqn_to_file_index_mapping.json",
        "fqn_to_dtype_mapping.json",
    )
    assert sorted(list_sources(model)) == sorted([*MODEL, *TOKENIZER, "code/deep.py"])


def test_weights_and_their_index_never_come_along(tmp_path: Path) -> None:
    weights = (
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "adapter_config.json",
        "x.gguf",
    )
    write_files(tmp_path / "base", *MODEL, *weights, ".git/config.json", "__pycache__/m.py", "onnx/config.json")
    assert sorted(list_sources(tmp_path / "absent", tmp_path / "base")) == sorted(MODEL)


@pytest.mark.parametrize("weights", ["policy/weights/model", "policy/weights"])
def test_the_tokenizer_beside_nemo_rl_weights_is_found(tmp_path: Path, weights: str) -> None:
    write_files(tmp_path / "policy/tokenizer", "config.json", *TOKENIZER)
    (tmp_path / weights).mkdir(parents=True)
    assert list_sources(tmp_path / weights)["tokenizer.json"] == "tokenizer/tokenizer.json"
    assert list_sources(tmp_path / weights)["config.json"] == "tokenizer/config.json"


def test_config_and_tokenizer_of_two_models_never_mix(tmp_path: Path) -> None:
    model = tmp_path / "policy/weights/model"
    write_files(model / ".hf_metadata", "config.json")
    write_files(tmp_path / "policy/tokenizer", "config.json", "generation_config.json", "tokenizer.json")
    assert list_sources(model) == {
        "config.json": ".hf_metadata/config.json",
        "tokenizer.json": "tokenizer/tokenizer.json",
    }


def test_a_named_directory_is_the_only_one_that_counts(tmp_path: Path) -> None:
    write_files(tmp_path / "model/.hf_metadata", *MODEL, *TOKENIZER)
    write_files(tmp_path / "base", "config.json")
    assert list_sources(tmp_path / "model", tmp_path / "base") == {"config.json": "base/config.json"}


def test_a_stray_json_beside_the_weights_is_no_asset_without_a_config(tmp_path: Path) -> None:
    write_files(tmp_path / "model", "training_info.json", "train.py")
    assert list_sources(tmp_path / "model") == {}
    write_files(tmp_path / "model", "config.json")
    assert "config.json" in list_sources(tmp_path / "model")


def test_an_unrelated_tokenizer_two_levels_up_is_not_taken(tmp_path: Path) -> None:
    write_files(tmp_path / "tokenizer", *TOKENIZER)
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert list_sources(tmp_path / "run" / "model") == {}


def test_links_are_followed_as_caches_are_made_of_them(tmp_path: Path) -> None:
    write_files(tmp_path / "blobs", "abc")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to(tmp_path / "blobs/abc")
    assert list_sources(tmp_path, tmp_path / "snapshot") == {"config.json": "blobs/abc"}


def test_excluded_names_stay_behind(tmp_path: Path) -> None:
    write_files(tmp_path, *MODEL)
    found = find_assets(tmp_path, None, exclude=frozenset({"generation_config.json"}))
    assert [asset.name for asset in found] == ["config.json", "modeling_own.py"]


def test_a_named_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"absent: expected a directory with config\.json"):
        find_assets(tmp_path, tmp_path / "absent", exclude=frozenset())


@pytest.mark.parametrize(
    ("names", "warnings"),
    [
        ((), ["no config.json", "no tokenizer"]),
        (("tokenizer.model",), ["no config.json"]),
        (("config.json",), ["no tokenizer"]),
        (("config.json", "tokenizer.json"), []),
    ],
)
def test_what_a_loader_will_miss_is_said(names: tuple[str, ...], warnings: list[str]) -> None:
    found = describe_missing(tuple(Asset(name, Path(name), 1) for name in names))
    assert [line[: len(start)] for line, start in zip(found, warnings, strict=True)] == warnings
    assert all("--assets" in line for line in found)


@pytest.mark.parametrize("closed", [".", "code"])
def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(closed: str) -> None:
    with give_up_root() as directory:
        write_files(directory / "base", *MODEL, "code/own.py")
        (directory / "base" / closed).chmod(0o300)
        with pytest.raises(LayoutError, match=r"base.*: cannot be looked into \(Permission denied\)"):
            list_sources(directory, directory / "base")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_link_that_leads_nowhere_is_not_passed_over(tmp_path: Path, name: str) -> None:
    write_files(tmp_path / "base", *MODEL)
    (tmp_path / "base" / name).unlink(missing_ok=True)
    (tmp_path / "base" / name).symlink_to("gone")
    with pytest.raises(CheckpointNotFoundError, match=f"{name}: expected a file .*found a link that leads nowhere"):
        list_sources(tmp_path, tmp_path / "base")
