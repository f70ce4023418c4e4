from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ckpt_core.errors import CorruptCheckpointError, KeyMismatchError
from ckpt_core.reader import open_checkpoint
from ckpt_core.stream import read_tensor, stream_tensor, tensors_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from testbed.sharded import Cut, cut_columns, cut_rows, save_dcp, save_sharded_safetensors


def count_up(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape).to(dtype)


def row_major(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


STATE: Mapping[str, torch.Tensor] = {
    "plain": count_up(7, 5),
    "deep": count_up(3, 4, 5, 2, dtype=torch.bfloat16),
    "transposed": count_up(6, 8, dtype=torch.int64).t(),
    "permuted": count_up(4, 5, 6).permute(2, 0, 1),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "one": torch.tensor([7], dtype=torch.int8),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.complex(count_up(3, 3), -count_up(3, 3)),
    "wide": torch.tensor([1, 65535, 3], dtype=torch.uint16),
    "eight": count_up(4, 4).to(torch.float8_e4m3fn),
    "four": torch.arange(32, dtype=torch.uint8).reshape(4, 8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("block_bytes", [1, 16, 70, 1 << 20])
@pytest.mark.parametrize("cut", [cut_rows(1), cut_rows(3), cut_columns(2), lambda _n, t: (2, 2)[: t.dim()]])
def test_dcp_streams_the_bytes_that_were_saved(tmp_path: Path, cut: Cut, block_bytes: int) -> None:
    reader = open_checkpoint(save_dcp(tmp_path / "d", STATE, ranks=4, cut=cut))
    for fqn, tensor in STATE.items():
        blocks = list(stream_tensor(reader, reader.tensors[fqn], block_bytes=block_bytes))
        assert b"".join(blocks) == row_major(tensor), fqn
        assert all(len(block) <= max(block_bytes, 8) for block in blocks)


@pytest.mark.parametrize("block_bytes", [8, 1 << 20])
def test_sharded_safetensors_stream_the_bytes_that_were_saved(tmp_path: Path, block_bytes: int) -> None:
    # torch's writer takes contiguous tensors only.
    state = {fqn: tensor.contiguous() for fqn, tensor in STATE.items()}
    reader = open_checkpoint(save_sharded_safetensors(tmp_path / "d", state, ranks=4, cut=cut_rows(3)))
    for fqn, tensor in STATE.items():
        got = b"".join(stream_tensor(reader, reader.tensors[fqn], block_bytes=block_bytes))
        assert got == row_major(tensor), fqn


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    cuts=st.lists(st.integers(1, 4), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    block_bytes=st.integers(1, 400),
)
def test_any_cut_and_any_strides_stream_in_row_major_order(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    cuts: tuple[int, ...],
    order: random.Random,
    block_bytes: int,
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    stored = count_up(*(shape[d] for d in dims), dtype=torch.int32)
    tensor = stored.permute([dims.index(d) for d in range(len(shape))]) if shape else stored
    cuts = cuts[: len(shape)]
    ranks = max(1, torch.Size(cuts).numel())
    path = save_dcp(tmp_path_factory.mktemp("s") / "d", {"x": tensor}, ranks=ranks, cut=lambda _n, _t: cuts)
    reader = open_checkpoint(path)
    assert reader.check() == []
    assert b"".join(stream_tensor(reader, reader.tensors["x"], block_bytes=block_bytes)) == row_major(tensor)


def test_blocks_depend_on_shape_and_dtype_only(tmp_path: Path) -> None:
    tensor = count_up(9, 6)
    rows = open_checkpoint(save_dcp(tmp_path / "rows", {"x": tensor}, ranks=4))
    columns = open_checkpoint(save_dcp(tmp_path / "columns", {"x": tensor}, ranks=3, cut=cut_columns(3)))
    sizes = [[len(b) for b in stream_tensor(r, r.tensors["x"], block_bytes=50)] for r in (rows, columns)]
    assert sizes[0] == sizes[1]


def test_a_tensor_with_a_hole_is_refused_before_anything_is_yielded(tmp_path: Path) -> None:
    reader = open_checkpoint(save_dcp(tmp_path / "d", {"x": count_up(4, 4)}, ranks=2))
    spec = reader.tensors["x"]
    with pytest.raises(CorruptCheckpointError, match="cover 8 of 16"):
        next(stream_tensor(reader, replace(spec, chunks=spec.chunks[:1])))


def test_a_file_cut_short_after_opening_is_refused(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", {"x": count_up(64, 64)}, ranks=1)
    reader = open_checkpoint(path)
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-10_000])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        list(stream_tensor(reader, reader.tensors["x"]))


@pytest.mark.parametrize("fqn", STATE)
def test_read_tensor_returns_the_saved_tensor_bit_for_bit(tmp_path: Path, fqn: str) -> None:
    reader = open_checkpoint(save_dcp(tmp_path / "d", {fqn: STATE[fqn]}, ranks=2))
    tensor = read_tensor(reader, fqn)
    assert (tensor.dtype, tensor.shape) == (STATE[fqn].dtype, STATE[fqn].shape)
    assert row_major(tensor) == row_major(STATE[fqn])


def test_read_tensor_names_what_is_not_there(tmp_path: Path) -> None:
    reader = open_checkpoint(save_dcp(tmp_path / "d", {"x": count_up(2)}, ranks=1))
    with pytest.raises(KeyMismatchError, match="'y'"):
        read_tensor(reader, "y")


def test_tensors_equal_compares_dtype_shape_and_every_byte(tmp_path: Path) -> None:
    base = count_up(40, 3)
    last_differs = base.clone()
    last_differs[-1, -1] = 0
    state = {
        "a": base,
        "b": base.clone(),
        "c": last_differs,
        "d": base.clone().reshape(3, 40),
        "e": base.to(torch.int32),
    }
    save_file(state, tmp_path / "model.safetensors")
    reader = open_checkpoint(tmp_path)
    found = {name: tensors_equal(reader, "a", name, block_bytes=64) for name in "bcde"}
    assert found == {"b": True, "c": False, "d": False, "e": False}


def test_an_f4_tensor_of_an_odd_last_dimension_streams_whole(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}'
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    reader = open_checkpoint(tmp_path)
    assert list(stream_tensor(reader, reader.tensors["x"], block_bytes=2)) == [b"ab", b"c"]


def run_python(script: str, argument: str) -> str:
    run = subprocess.run(  # noqa: S603  this interpreter, our own script
        [sys.executable, "-c", textwrap.dedent(script), argument], capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_memory_is_bounded_by_the_block_not_by_the_tensor(tmp_path: Path) -> None:
    """64 MiB in column chunks, one of them transposed on disk, within a few blocks of 1 MiB."""
    tensor = torch.arange(16 << 20, dtype=torch.int32).reshape(4096, 4096)
    path = save_dcp(tmp_path / "d", {"x": tensor.t().contiguous().t()}, ranks=2, cut=cut_columns(2))
    script = """
        import resource, sys
        from ckpt_core.reader import open_checkpoint
        from ckpt_core.stream import stream_tensor
        import numpy
        reader = open_checkpoint(sys.argv[1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        total = sum(len(block) for block in stream_tensor(reader, reader.tensors["x"], block_bytes=1 << 20))
        print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, "torch" in sys.modules)
    """
    total, grown_kib, torch_imported = run_python(script, str(path)).split()
    assert int(total) == 64 << 20
    assert int(grown_kib) < 8 << 10
    assert torch_imported == "False"


def test_a_tensor_may_lie_in_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", {"x": count_up(100, 2)}, ranks=100)
    script = """
        import resource, sys
        from ckpt_core.reader import open_checkpoint
        from ckpt_core.stream import stream_tensor
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        reader = open_checkpoint(sys.argv[1])
        print(sum(len(block) for block in stream_tensor(reader, reader.tensors["x"], block_bytes=48)))
    """
    assert run_python(script, str(path)) == "800"


def test_blocks_follow_one_another_without_gap(tmp_path: Path) -> None:
    save_file({"x": count_up(5, 7)}, tmp_path / "model.safetensors")
    reader = open_checkpoint(tmp_path)
    blocks = [bytes(b) for b in stream_tensor(reader, reader.tensors["x"], block_bytes=28)]
    rows = [torch.frombuffer(bytearray(b), dtype=torch.float32) for b in blocks]
    assert all(b[0] == a[-1] + 1 for a, b in pairwise(rows))
