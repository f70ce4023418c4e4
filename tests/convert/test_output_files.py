from __future__ import annotations

import json
import math

import pytest
from ckpt_convert import output_files
from ckpt_convert.output_files import PlannedFile, build_index, lay_out_files
from ckpt_core.errors import ConfigError
from ckpt_core.spec import TensorSpec
from safetensors import deserialize


def make_specs(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {fqn: TensorSpec(f"stored.{fqn}", dtype, shape, ()) for fqn, (dtype, shape) in tensors.items()}


def list_names(file: PlannedFile) -> list[str]:
    return [tensor.fqn for tensor in file.tensors]


def test_one_file_is_what_the_safetensors_library_reads() -> None:
    (file,) = lay_out_files(make_specs(a=("F32", (2, 3)), b=("BOOL", ()), c=("I64", (0, 4)), d=("F8_E4M3", (5,))), 1000)
    assert file.name == "model.safetensors"
    content = file.header + bytes(file.size - len(file.header))
    views = deserialize(content)  # type: ignore[no-untyped-call]
    read = {name: (view["dtype"], view["shape"]) for name, view in views}
    assert read == {"a": ("F32", [2, 3]), "b": ("BOOL", []), "c": ("I64", [0, 4]), "d": ("F8_E4M3", [5])}
    assert json.loads(file.header[8:])["__metadata__"] == {"format": "pt"}


def test_every_tensor_is_aligned_to_its_elements_and_none_leaves_a_gap() -> None:
    (file,) = lay_out_files(make_specs(a=("U8", (3,)), b=("F32", (5,)), c=("I64", (2,)), d=("BF16", (3,))), 1000)
    assert list_names(file) == ["c", "b", "d", "a"]
    assert [tensor.offset - len(file.header) for tensor in file.tensors] == [0, 16, 36, 42]
    assert file.size == len(file.header) + 45
    assert len(file.header) % 8 == 0


def test_files_do_not_depend_on_the_order_in_the_source() -> None:
    specs = make_specs(**{f"layers.{i}.w": ("F32", (i + 1,)) for i in range(12)}, head=("F32", (1,)))
    assert lay_out_files(dict(reversed(specs.items())), 64) == lay_out_files(specs, 64)


def test_layers_are_counted_as_numbers_whatever_digits_a_name_holds() -> None:
    names = ["layers.10.w", "layers.9.w", "layers.1.w", "layers.01.w", "layers.x.w", "9", "layers.٣.w"]
    (file,) = lay_out_files({fqn: TensorSpec(fqn, "U8", (1,), ()) for fqn in names}, 1000)
    assert list_names(file) == [
        "9", "layers.01.w", "layers.1.w", "layers.٣.w", "layers.9.w", "layers.10.w", "layers.x.w",
    ]  # fmt: skip


def test_tensors_fill_files_up_to_the_limit_and_a_larger_one_is_alone() -> None:
    specs = make_specs(a=("U8", (60,)), b=("U8", (40,)), c=("U8", (1,)), d=("U8", (500,)), e=("U8", (99,)))
    files = lay_out_files(specs, 100)
    assert [list_names(file) for file in files] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [file.name for file in files] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]


def test_the_index_names_the_file_of_every_tensor_and_counts_their_bytes() -> None:
    files = lay_out_files(make_specs(a=("F32", (10,)), b=("F32", (20,)), z=("BOOL", ())), 60)
    assert json.loads(build_index(files)) == {
        "metadata": {"total_size": 121},
        "weight_map": {
            "a": "model-00001-of-00003.safetensors",
            "b": "model-00002-of-00003.safetensors",
            "z": "model-00003-of-00003.safetensors",
        },
    }


def test_no_tensors_make_one_empty_file() -> None:
    (file,) = lay_out_files({}, 1)
    assert deserialize(file.header) == []  # type: ignore[no-untyped-call]


def test_a_header_that_readers_refuse_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = make_specs(**{f"tensor_{i}": ("F32", (1,)) for i in range(50)})
    (file,) = lay_out_files(specs, 10**9)
    monkeypatch.setattr(output_files, "MAX_HEADER_BYTES", len(file.header) - 8)
    assert lay_out_files(specs, 10**9) == (file,)
    monkeypatch.setattr(output_files, "MAX_HEADER_BYTES", len(file.header) - 9)
    with pytest.raises(ConfigError, match=r"model\.safetensors: a header of .* 50 tensors.*--max-shard-size"):
        lay_out_files(specs, 10**9)
    assert math.prod(len(f.tensors) for f in lay_out_files(specs, 4)) == 1
