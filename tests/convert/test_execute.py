"""What a conversion writes, against torch's and safetensors' own readers."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_convert import convert, copy_tensors
from ckpt_convert.output_files import PlannedFile
from ckpt_convert.parallel import Workers
from ckpt_core.digest import digest_tensor
from ckpt_core.errors import CorruptCheckpointError, SaveError, SpaceError, TargetError, VerificationError
from ckpt_core.reader import CheckpointReader
from ckpt_core.record import RECORD_NAME, read_record
from testbed.sharded import Cut, cut_columns, cut_rows, save_dcp, save_sharded_safetensors
from testbed.tensors import DTYPES, describe, make_tensor, read_bytes, read_safetensors
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load

SHAPES = [(7, 5), (8, 6, 4), (1, 9), (3,), (1,), (), (0,), (4, 0), (0, 3), (64, 33)]


def cut_grid(_fqn: str, tensor: torch.Tensor) -> tuple[int, ...]:
    return (2, 2) if tensor.dim() > 1 else (4,) * tensor.dim()


def cut_third(_fqn: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Cut the last dimension only, whatever its number."""
    return (1,) * (tensor.dim() - 1) + (4,) if tensor.dim() else ()


CUTS: dict[str, Cut] = {
    "rows": cut_rows(4),
    "columns": cut_columns(4),
    "grid": cut_grid,
    "last": cut_third,
    "whole": lambda *_: (),
}


def read_dcp(path: Path) -> dict[str, Any]:
    """Read a DCP as torch's own converter does."""
    target = path.parent / f"{path.name}.pt"
    dcp_to_torch_save(path, target)
    state: dict[str, Any] = torch.load(target, weights_only=False)
    return state


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(tmp_path: Path, dtype: torch.dtype, cut: str) -> None:
    state = {f"layer.{i}.w": make_tensor(dtype, shape, seed=i) for i, shape in enumerate(SHAPES)}
    source = save_dcp(tmp_path / "dcp", state, ranks=4, cut=CUTS[cut])
    report = convert(source, tmp_path / "out")
    found = describe(read_safetensors(tmp_path / "out"))
    assert found == describe(state)
    assert found == describe(read_dcp(source))
    assert report.verified


def test_dtypes_mix_in_one_file(tmp_path: Path) -> None:
    state = {f"w.{dtype}": make_tensor(dtype, (5, 3), seed=i) for i, dtype in enumerate(DTYPES)}
    convert(save_dcp(tmp_path / "dcp", state, ranks=3), tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(state)


def test_packed_float4_arrives_bit_for_bit(tmp_path: Path) -> None:
    tensor = make_tensor(torch.uint8, (6, 8)).view(torch.float4_e2m1fn_x2)
    convert(save_dcp(tmp_path / "dcp", {"w": tensor}, ranks=1, cut=CUTS["whole"]), tmp_path / "out")
    (found,) = read_safetensors(tmp_path / "out").values()
    assert found.dtype == torch.float4_e2m1fn_x2
    assert read_bytes(found.view(torch.uint8)) == read_bytes(tensor.view(torch.uint8))


@pytest.mark.parametrize("cut", CUTS)
def test_tensors_that_were_saved_transposed_arrive_in_row_major_order(tmp_path: Path, cut: str) -> None:
    state = {
        "transposed": make_tensor(torch.float32, (9, 14), 1).t(),
        "permuted": make_tensor(torch.int16, (4, 5, 6), 2).permute(2, 0, 1),
        "every_other": make_tensor(torch.bfloat16, (8, 6), 3)[:, ::2],
        "expanded": make_tensor(torch.float64, (1, 5), 4).expand(6, 5),
        "column": make_tensor(torch.float32, (7, 7), 5)[:, 2],
    }
    source = save_dcp(tmp_path / "dcp", state, ranks=4, cut=CUTS[cut])
    convert(source, tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(read_dcp(source)) == describe(state)


@pytest.mark.parametrize("cut", ["rows", "columns", "grid"])
def test_tensors_larger_than_every_buffer_arrive_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    monkeypatch.setattr("ckpt_convert.execute._BLOCK", 1 << 16)
    monkeypatch.setattr("ckpt_convert.byte_copy.STEP", 1 << 15)
    state = {"w": make_tensor(torch.float32, (1001, 515)), "wide": make_tensor(torch.uint8, (3, 400_001), 1)}
    convert(save_dcp(tmp_path / "dcp", state, ranks=4, cut=CUTS[cut]), tmp_path / "out", threads=3)
    assert describe(read_safetensors(tmp_path / "out")) == describe(state)


def test_a_dimension_smaller_than_the_mesh_leaves_ranks_empty(tmp_path: Path) -> None:
    state = {f"n{n}": make_tensor(torch.bfloat16, (n, 3), n) for n in range(1, 10)}
    convert(save_dcp(tmp_path / "dcp", state, ranks=8), tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(state)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_scalars_keep_their_value_wherever_they_stand(tmp_path: Path, dtype: torch.dtype, *, first: bool) -> None:
    name = "a_scale" if first else "z_scale"
    state = {"w": torch.ones(2), name: torch.tensor(3.5).to(dtype)}
    convert(save_dcp(tmp_path / "dcp", state), tmp_path / "out")
    assert torch.equal(read_safetensors(tmp_path / "out")[name], state[name])


ODD_NAMES = ["a b", "чек.вес", 'q"uote', "back\\slash", "a/../../b", "new\nline", "embed.lora.optim.adapter.state", "9"]


def test_odd_names_stay_as_they_are(tmp_path: Path) -> None:
    state = {name: make_tensor(torch.float32, (2, 2), i) for i, name in enumerate(ODD_NAMES)}
    convert(save_dcp(tmp_path / "dcp", state), tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(state)


def test_dcp_load_reads_the_same_values(tmp_path: Path) -> None:
    state = {"w": make_tensor(torch.int64, (10, 3)), "b": make_tensor(torch.int32, (7,), 1)}
    source = save_dcp(tmp_path / "dcp", state, ranks=4)
    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is .* uninitialized"):
        load(loaded, checkpoint_id=source, no_dist=True)
    convert(source, tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(loaded)


def test_sharded_safetensors_become_consolidated(tmp_path: Path) -> None:
    state = {f"layer.{i}.w": make_tensor(dtype, (7, 6), i) for i, dtype in enumerate((torch.bfloat16, torch.float32))}
    state["scale"] = torch.tensor(3.5)
    source = save_sharded_safetensors(tmp_path / "sharded", state, ranks=3, cut=cut_columns(3))
    report = convert(source, tmp_path / "out")
    assert report.plan.source_layout == "safetensors-sharded"
    assert any("a missing last shard would go unseen" in warning for warning in report.plan.warnings)
    assert describe(read_safetensors(tmp_path / "out")) == describe(state)


def test_consolidated_files_are_split_anew_and_joined_again(tmp_path: Path) -> None:
    state = {f"layer.{i}.w": make_tensor(torch.float32, (10,), i) for i in range(5)}
    first = convert(save_dcp(tmp_path / "dcp", state), tmp_path / "one")
    split = convert(tmp_path / "one", tmp_path / "many", max_shard_size=80)
    assert sorted(name for name in split.files if name.endswith(".safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert describe(read_safetensors(tmp_path / "many")) == describe(state)
    joined = convert(tmp_path / "many", tmp_path / "joined")
    assert joined.digests == split.digests == first.digests
    assert (tmp_path / "joined/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()


def test_the_record_holds_what_the_directory_holds(tmp_path: Path) -> None:
    state = {"w": make_tensor(torch.bfloat16, (6, 4)), "s": torch.tensor(2, dtype=torch.int64)}
    report = convert(save_dcp(tmp_path / "dcp", state), tmp_path / "out", max_shard_size=20)
    record = read_record(tmp_path / "out")
    assert record is not None
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != RECORD_NAME}
    assert dict(record.files) == on_disk == dict(report.files)
    assert record.source_layout == "dcp"
    assert {fqn: (t.dtype, t.shape, t.digest) for fqn, t in record.tensors.items()} == {
        "w": ("BF16", (6, 4), digest_tensor("BF16", (6, 4), [read_bytes(state["w"])])),
        "s": ("I64", (), digest_tensor("I64", (), [read_bytes(state["s"])])),
    }
    assert {fqn: t.digest for fqn, t in record.tensors.items()} == report.digests


def test_without_verifying_the_record_has_no_digests(tmp_path: Path) -> None:
    state = {"w": make_tensor(torch.float32, (6, 4))}
    report = convert(save_dcp(tmp_path / "dcp", state), tmp_path / "out", verify=False)
    record = read_record(tmp_path / "out")
    assert record is not None
    assert record.tensors["w"].digest is None
    assert not report.verified
    assert describe(read_safetensors(tmp_path / "out")) == describe(state)


def read_tree(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*")}


def test_the_same_input_gives_the_same_bytes_whatever_the_sharding_and_the_threads(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": make_tensor(torch.bfloat16, (8, 8), i) for i in range(12)}
    for name, cut in CUTS.items():
        convert(save_dcp(tmp_path / f"dcp_{name}", state, ranks=4, cut=cut), tmp_path / name, max_shard_size=500)
    convert(tmp_path / "dcp_rows", tmp_path / "again", max_shard_size=500, threads=1)
    expected = read_tree(tmp_path / "rows")
    assert all(read_tree(tmp_path / name) == expected for name in [*CUTS, "again"])


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_come_from_the_umask(tmp_path: Path, mask: int) -> None:
    source = save_dcp(tmp_path / "dcp", {"w": torch.ones(3)})
    (source / "config.json").write_text("{}")
    previous = os.umask(mask)
    try:
        convert(source, tmp_path / "out")
    finally:
        os.umask(previous)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~mask}


def test_assets_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"w": torch.ones(3)})
    (source / ".hf_metadata/code").mkdir(parents=True)
    generation = b'{ "eos_token_id": [1, 2],\r\n"odd":"\xd1\x87" }'
    (source / ".hf_metadata/generation_config.json").write_bytes(generation)
    (source / ".hf_metadata/code/own.py").write_bytes(b"x = 1\n")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out/generation_config.json").read_bytes() == generation
    assert (tmp_path / "out/code/own.py").read_bytes() == b"x = 1\n"


@pytest.mark.parametrize("name", ["run 0.91", "чек", "x" * 200, "a.b.c"])
def test_any_legal_path_works_with_a_slash_at_its_end_or_as_a_link(tmp_path: Path, name: str) -> None:
    state = {"w": make_tensor(torch.float32, (4, 4))}
    save_dcp(tmp_path / name / "dcp", state)
    (tmp_path / "link").symlink_to(tmp_path / name)
    convert(f"{tmp_path}/link/dcp/", f"{tmp_path}/link/out 1.0/")
    assert describe(read_safetensors(tmp_path / name / "out 1.0")) == describe(state)


def test_relative_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": make_tensor(torch.float32, (4, 4))}
    save_dcp(tmp_path / "dcp", state)
    monkeypatch.chdir(tmp_path)
    convert("dcp", "deep/out")
    assert describe(read_safetensors(tmp_path / "deep/out")) == describe(state)


def test_an_earlier_result_is_replaced_whole(tmp_path: Path) -> None:
    old = {f"w{i}": make_tensor(torch.float32, (10,), i) for i in range(4)}
    new = {"w0": make_tensor(torch.float32, (10,), 9)}
    convert(save_dcp(tmp_path / "old", old), tmp_path / "out", max_shard_size=40)
    source = save_dcp(tmp_path / "new", new)
    with pytest.raises(TargetError, match="--overwrite"):
        convert(source, tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(old)
    convert(source, tmp_path / "out", overwrite=True)
    assert describe(read_safetensors(tmp_path / "out")) == describe(new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "out"]


def test_an_empty_directory_becomes_the_result(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(save_dcp(tmp_path / "dcp", {"w": torch.ones(3)}), tmp_path / "out")
    assert read_safetensors(tmp_path / "out").keys() == {"w"}


def assert_nothing_written(folder: Path, *expected: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)


def interfere(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[Path], object] = bool,
    after: Callable[[Path], object] = bool,
) -> None:
    """Do something to the source or the stage right before or after the tensors are written."""
    write_files = copy_tensors.write_files

    def write(files: tuple[PlannedFile, ...], reader: CheckpointReader, directory: Path, workers: Workers) -> None:
        before(directory)
        write_files(files, reader, directory, workers)
        after(directory)

    monkeypatch.setattr("ckpt_convert.execute.write_files", write)


def test_a_flipped_byte_on_the_way_is_found_named_and_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_dcp(tmp_path / "dcp", {"a": make_tensor(torch.float32, (6, 5)), "b": make_tensor(torch.int8, (4,))})
    copy_file_range = os.copy_file_range

    def flip(src: int, dst: int, count: int, *, offset_src: int, offset_dst: int) -> int:
        copied = copy_file_range(src, dst, count, offset_src=offset_src, offset_dst=offset_dst)
        if copied == 60:
            os.pwrite(dst, bytes([os.pread(src, 1, offset_src + 7)[0] ^ 1]), offset_dst + 7)
        return copied

    monkeypatch.setattr(os, "copy_file_range", flip)
    with pytest.raises(VerificationError, match=r"differs from .*; nothing was published") as caught:
        convert(source, tmp_path / "out")
    assert [(p.where, p.message) for p in caught.value.problems] == [("a", "byte 7 of 120 differs from the source")]
    assert_nothing_written(tmp_path, "dcp")


def test_a_truncated_output_is_found_and_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_dcp(tmp_path / "dcp", {"w": make_tensor(torch.float32, (6, 5))})

    def lose_the_end(directory: Path) -> None:
        path = directory / "model.safetensors"
        os.truncate(path, path.stat().st_size - 3)

    interfere(monkeypatch, after=lose_the_end)
    with pytest.raises(VerificationError) as caught:
        convert(source, tmp_path / "out")
    assert [(p.kind, p.where) for p in caught.value.problems] == [("short_file", "model.safetensors"), ("value", "w")]
    assert_nothing_written(tmp_path, "dcp")


def test_a_failing_write_is_explained_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_dcp(tmp_path / "dcp", {"w": torch.ones(3)})

    def fail(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(SpaceError, match=r"out: nothing was published.* failed .No space left on device"):
        convert(source, tmp_path / "out")
    monkeypatch.setattr(os, "copy_file_range", lambda *_, **__: fail_with_io_error())
    with pytest.raises(SaveError, match=r"nothing was published.*Input/output error"):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path, "dcp")


def fail_with_io_error() -> int:
    raise OSError(5, "Input/output error")


def test_too_little_space_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_dcp(tmp_path / "dcp", {"w": torch.ones(1000)})
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("", (), {"total": usage.f_blocks, "free": 4000}))
    with pytest.raises(SpaceError, match=r"out: needs .* bytes, 4,000 are available"):
        convert(source, tmp_path / "nested/out")
    assert_nothing_written(tmp_path, "dcp")


def test_a_source_that_lost_bytes_after_planning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_dcp(tmp_path / "dcp", {"w": make_tensor(torch.float32, (600, 50))}, ranks=1)
    interfere(monkeypatch, before=lambda _: os.truncate(source / "__0_0.distcp", 4000))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path, "dcp")


def test_what_came_to_the_target_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    source = save_dcp(tmp_path / "dcp", {"w": torch.ones(3)})
    interfere(monkeypatch, after=lambda _: (tmp_path / "out/notes.txt").write_text("mine"))
    with pytest.raises(TargetError, match=r"found notes\.txt"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert_nothing_written(tmp_path, "dcp", "out")


def test_progress_counts_every_byte_once_for_copying_and_once_for_comparing(tmp_path: Path) -> None:
    state = {"rows": make_tensor(torch.float32, (9, 5)), "scalar": torch.tensor(1.0)}
    source = save_dcp(tmp_path / "dcp", state, ranks=3, cut=cut_columns(3))
    counted: list[int] = []
    convert(source, tmp_path / "out", progress=counted.append)
    assert sum(counted) == 2 * (180 + 4)
    convert(source, tmp_path / "fast", progress=counted.append, verify=False)
    assert sum(counted) == 3 * (180 + 4)


def test_the_report_is_json_and_text(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "step": 7, "rng": io.BytesIO(b"x")}
    report = convert(save_dcp(tmp_path / "dcp", state), tmp_path / "out")
    content = json.loads(json.dumps(report.to_json()))
    assert content["tensors"] == 1
    assert content["verified"] is True
    assert content["digests"] == {"w": report.digests["w"]}
    assert "1 tensors, 12 B, every tensor read back and equal to the source" in str(report)
    assert "step" in str(report)
