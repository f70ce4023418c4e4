from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_core.adapter import AdapterConfig, AdapterReader, read_adapter_config
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.layout import CheckpointLayout
from ckpt_core.reader import open_checkpoint
from ckpt_core.record import CheckpointRecord, TensorRecord, measure_files, write_record
from ckpt_core.safetensors_reader import SafetensorsReader
from ckpt_core.stream import read_tensor
from safetensors import safe_open
from safetensors.torch import save_file

FIRST = {"a": torch.arange(6.0).reshape(2, 3), "e": torch.empty(0, 2)}
SECOND = {"b": torch.arange(4, dtype=torch.int64), "s": torch.tensor(1.5, dtype=torch.float16)}
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_set(path: Path, *, index: bool = True) -> Path:
    path.mkdir(exist_ok=True)
    for name, state in zip(PARTS, (FIRST, SECOND), strict=True):
        save_file(state, path / name, {"format": "pt"})
    if index:
        write_index(path, dict.fromkeys(FIRST, PARTS[0]) | dict.fromkeys(SECOND, PARTS[1]))
    return path


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def kinds(path: Path) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where) for problem in SafetensorsReader(path).check()]


@pytest.mark.parametrize("index", [True, False])
def test_a_set_reads_as_the_library_reads_it(tmp_path: Path, index: bool) -> None:
    reader = open_checkpoint(write_set(tmp_path / "m", index=index))
    assert reader.layout is CheckpointLayout.SAFETENSORS
    assert sorted(reader.tensors) == ["a", "b", "e", "s"]
    for name in PARTS:
        with safe_open(tmp_path / "m" / name, "pt") as file:
            for fqn in file.keys():  # noqa: SIM118  safe_open is no dict
                assert torch.equal(read_tensor(reader, fqn), file.get_tensor(fqn))


def test_a_single_file_is_a_whole_checkpoint(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "anything.safetensors")
    for path in (tmp_path, tmp_path / "anything.safetensors"):
        reader = open_checkpoint(path)
        assert reader.check() == []
        assert torch.equal(read_tensor(reader, "a"), FIRST["a"])
        assert reader.path == path


def test_a_complete_set_with_an_index_has_no_problems(tmp_path: Path) -> None:
    assert kinds(write_set(tmp_path / "m")) == []


def test_a_set_without_an_index_cannot_be_proven_complete(tmp_path: Path) -> None:
    problems = SafetensorsReader(write_set(tmp_path / "m", index=False)).check()
    assert [(p.kind, p.severity) for p in problems] == [("unproven", "warning")]


def test_one_file_of_a_set_is_no_whole_model(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m") / PARTS[0]
    assert kinds(path) == [("unproven", PARTS[0])]


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    blobs = write_set(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(os.path.relpath(file, tmp_path / "snapshot"))
    reader = open_checkpoint(tmp_path / "snapshot")
    assert reader.check() == []
    assert torch.equal(read_tensor(reader, "b"), SECOND["b"])


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_file_of_a_set_is_named(tmp_path: Path, index: bool) -> None:
    path = write_set(tmp_path / "m", index=index)
    (path / PARTS[1]).unlink()
    assert kinds(path) == [("missing_file", PARTS[1])]


def test_a_broken_link_is_a_missing_file(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    (path / PARTS[0]).unlink()
    (path / PARTS[0]).symlink_to("nowhere")
    assert ("missing_file", PARTS[0]) in kinds(path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    data = (path / PARTS[1]).read_bytes()
    (path / PARTS[1]).write_bytes(data[:-3])
    assert ("short_file", PARTS[1]) in kinds(path)


def test_if_no_file_can_be_used_opening_fails(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nonsense, not a header")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        SafetensorsReader(tmp_path)


def test_an_index_entry_without_data_is_a_missing_tensor(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    everything = dict.fromkeys(FIRST, PARTS[0]) | dict.fromkeys(SECOND, PARTS[1])
    write_index(path, everything | {"ghost": PARTS[1]})
    assert kinds(path) == [("missing_tensor", "ghost")]


def test_an_index_that_names_the_wrong_file_is_found(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    write_index(path, dict.fromkeys([*FIRST, *SECOND], PARTS[0]) | {"b": PARTS[1]})
    assert kinds(path) == [("missing_tensor", "s")]


def test_a_tensor_that_the_index_does_not_list_is_unexpected(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    write_index(path, dict.fromkeys(FIRST, PARTS[0]) | {"b": PARTS[1]})
    assert kinds(path) == [("unexpected_tensor", "s")]


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_files_is_a_duplicate(tmp_path: Path, index: bool) -> None:
    path = write_set(tmp_path / "m", index=index)
    save_file({**SECOND, "a": torch.zeros(2, 3)}, path / PARTS[1])
    assert ("duplicate_tensor", "a") in kinds(path)


def test_a_file_beside_the_index_is_a_warning(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    save_file({"x": torch.ones(1)}, path / "consolidated.safetensors")
    problems = SafetensorsReader(path).check()
    assert [(p.kind, p.where, p.severity) for p in problems] == [("stray_file", "consolidated.safetensors", "warning")]


def test_an_extra_file_in_a_set_without_an_index_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m", index=False)
    save_file({"x": torch.ones(1)}, path / "stray.safetensors")
    assert ("unexpected_tensor", "stray.safetensors") in kinds(path)


def write_matching_record(path: Path, **tensors: TensorRecord) -> None:
    found = {fqn: TensorRecord(s.dtype, s.shape) for fqn, s in SafetensorsReader(path).tensors.items()}
    write_record(path, CheckpointRecord("1", measure_files(path), found | tensors))


def test_a_record_proves_that_a_set_without_an_index_is_complete(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m", index=False)
    write_matching_record(path)
    assert kinds(path) == []


def test_a_record_refutes_a_set_that_lost_a_tensor(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    write_matching_record(path, lost=TensorRecord("F32", (3,)), a=TensorRecord("F16", (2, 3)))
    assert kinds(path) == [("missing_tensor", "lost"), ("dtype", "a")] or kinds(path) == [
        ("dtype", "a"),
        ("missing_tensor", "lost"),
    ]


def test_a_file_that_shrinks_after_opening_is_refused(tmp_path: Path) -> None:
    reader = SafetensorsReader(write_set(tmp_path / "m"))
    spec = reader.tensors["b"]
    (tmp_path / "m" / PARTS[1]).write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="'b'"):
        reader.locate(spec, spec.chunks[0])
    (tmp_path / "m" / PARTS[1]).unlink()
    with pytest.raises(CheckpointNotFoundError, match=PARTS[1]):
        reader.locate(spec, spec.chunks[0])


CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "org/name",
    "more": {"unknown": True},
}
WEIGHTS = {"base_model.model.q_proj.lora_A.weight": torch.arange(8.0).reshape(2, 4)}


def write_adapter(path: Path, config: object = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    save_file(WEIGHTS, path / "adapter_model.safetensors")
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (path / "adapter_config.json").write_bytes(text)
    return path


def test_an_adapter_is_opened_with_its_configuration(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    reader = open_checkpoint(path)
    assert reader.layout is CheckpointLayout.ADAPTER
    assert list(reader.tensors) == list(WEIGHTS)
    assert reader.check() == []
    assert read_adapter_config(path) == AdapterConfig("LORA", 8, 16, ("q_proj", "v_proj"), "org/name")


def test_an_adapter_made_by_peft_is_read(tmp_path: Path) -> None:
    import peft  # noqa: PLC0415  takes seconds to import

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["0"], use_rslora=True)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    found = read_adapter_config(tmp_path)
    assert (found.peft_type, found.r, found.lora_alpha, found.target_modules) == ("LORA", 3, 5, ("0",))
    assert len(open_checkpoint(tmp_path).tensors) == 2


def test_an_adapter_without_a_configuration_is_incomplete(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    (path / "adapter_config.json").unlink()
    assert [(p.kind, p.where) for p in AdapterReader(path).check()] == [("missing_file", "adapter_config.json")]
    with pytest.raises(CheckpointNotFoundError, match=r"adapter_config\.json"):
        read_adapter_config(path)


@pytest.mark.parametrize("field", [{}, {"r": None, "lora_alpha": None, "target_modules": "all-linear"}])
def test_other_peft_types_may_lack_lora_fields(tmp_path: Path, field: dict[str, object]) -> None:
    found = read_adapter_config(write_adapter(tmp_path / "a", {"peft_type": "IA3", **field}))
    assert (found.peft_type, found.r) == ("IA3", None)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (b"{", "JSON"),
        (b"\xff", "JSON"),
        ([], "list"),
        ({}, "peft_type"),
        ({"peft_type": 5}, "peft_type"),
        ({**CONFIG, "r": "8"}, "r to be"),
        ({**CONFIG, "r": 0}, "r to be"),
        ({**CONFIG, "r": True}, "r to be"),
        ({**CONFIG, "lora_alpha": "16"}, "lora_alpha"),
        ({**CONFIG, "target_modules": [1]}, "target_modules"),
        ({**CONFIG, "target_modules": {}}, "target_modules"),
        ({**CONFIG, "base_model_name_or_path": []}, "base_model_name_or_path"),
    ],
)
def test_a_malformed_configuration_is_one_error_that_names_the_field(
    tmp_path: Path, config: object, named: str
) -> None:
    path = write_adapter(tmp_path / "a", config)
    with pytest.raises(CorruptCheckpointError, match=named):
        read_adapter_config(path)
    assert [p.where for p in AdapterReader(path).check()] == ["adapter_config.json"]


@pytest.mark.parametrize("offsets", [[1, 0], [0, 3], None, "0"])
@pytest.mark.parametrize("index", [True, False])
def test_a_chunk_of_a_tensor_is_never_read_as_the_whole(tmp_path: Path, offsets: object, index: bool) -> None:
    path = write_set(tmp_path / "m", index=index)
    sharding = json.dumps({"b": {"saved_offsets": offsets}})
    save_file(SECOND, path / PARTS[1], {"DCP_SHARDING_INFO": sharding})
    assert ("hole", "b") in kinds(path)


def test_a_whole_tensor_may_be_declared_as_a_chunk_at_zero(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    save_file(SECOND, path / PARTS[1], {"DCP_SHARDING_INFO": json.dumps({"b": {"saved_offsets": [0]}})})
    assert kinds(path) == []


def test_a_declaration_of_chunks_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    save_file(SECOND, path / PARTS[1], {"DCP_SHARDING_INFO": "["})
    assert kinds(path) == [("bad_header", PARTS[1])]


def put_link(path: Path) -> None:
    path.symlink_to("/nowhere/blob")


@pytest.mark.parametrize("put", [put_link, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
@pytest.mark.parametrize("metadata", [{}, {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0, 0]}}'}])
def test_an_entry_that_is_no_file_is_a_missing_file(
    tmp_path: Path, put: Callable[[Path], object], metadata: dict[str, str]
) -> None:
    save_file({"a": FIRST["a"]}, tmp_path / "model-a.safetensors", metadata)
    put(tmp_path / "model-b.safetensors")
    problems = open_checkpoint(tmp_path).check()
    assert ("missing_file", "model-b.safetensors") in [(problem.kind, problem.where) for problem in problems]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("put", [put_link, Path.mkdir, os.mkfifo])
def test_a_checkpoint_of_nothing_but_entries_that_are_no_files_is_refused(
    tmp_path: Path, put: Callable[[Path], object], name: str
) -> None:
    put(tmp_path / name)
    with pytest.raises((CheckpointNotFoundError, CorruptCheckpointError), match="found a"):
        open_checkpoint(tmp_path)


def test_an_index_beside_a_single_file_that_loaders_prefer_is_ambiguous(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    save_file(FIRST, path / "model.safetensors")
    assert kinds(path) == [("unexpected_tensor", "model.safetensors")]


def test_an_index_of_nothing_is_a_problem(tmp_path: Path) -> None:
    path = write_set(tmp_path / "m")
    write_index(path, {})
    assert ("bad_header", "model.safetensors.index.json") in kinds(path)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model-00001-of-00001", "model-00001-of-00002", "model-00002-of-00002"], "model-00001-of-00001"),
        (["model-00001-of-00001", "other-00001-of-00001"], "model-00001-of-00001"),
        (["model-00001-of-00002", "model-00002-of-00002", "model-00003-of-00002"], "model-00003-of-00002"),
        (["model-00000-of-00001", "model-00001-of-00001"], "model-00000-of-00001"),
    ],
)
def test_names_of_more_than_one_set_are_a_problem(tmp_path: Path, names: list[str], expected: str) -> None:
    for number, name in enumerate(names):
        save_file({f"t{number}": torch.full((2,), number)}, tmp_path / f"{name}.safetensors")
    assert ("unexpected_tensor", f"{expected}.safetensors") in kinds(tmp_path)


@pytest.mark.parametrize(("first", "second"), [("1-of-2", "2-of-2"), ("000001-of-000002", "000002-of-000002")])
def test_parts_are_counted_however_many_digits_they_have(tmp_path: Path, first: str, second: str) -> None:
    save_file(FIRST, tmp_path / f"model-{first}.safetensors")
    assert kinds(tmp_path) == [("missing_file", f"model-{second}.safetensors")]


def test_a_name_that_counts_a_billion_parts_is_reported_soon(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "model-1-of-999999999.safetensors")
    assert len(kinds(tmp_path)) == 100
