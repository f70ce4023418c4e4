"""The law of a conversion: whatever was saved, however it was cut, arrives bit for bit."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from ckpt_convert import convert
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.sharded import save_dcp, save_sharded_safetensors
from testbed.tensors import DTYPES, describe, make_tensor, read_safetensors

# Anything that is text; the components that wrappers insert come off, and are tested by themselves.
NAMES = (
    st.lists(
        st.one_of(
            st.sampled_from(["layers", "0", "10", "weight", "bias", "embed", "optim", "state", "чек", "a b", 'q"']),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=4,
    )
    .map(".".join)
    .filter(lambda name: name.split(".")[0] not in {"module", "__metadata__"})
)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def draw_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Draw named tensors of any dtype and shape, some of them not contiguous."""
    tensors = {}
    for seed, name in enumerate(draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))):
        tensor = make_tensor(draw(st.sampled_from(DTYPES)), draw(SHAPES), seed)
        if tensor.dim() > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, tensor.dim() - 1)
        tensors[name] = tensor
    return tensors


CUTS = st.lists(st.integers(1, 3), max_size=3)


@given(state=draw_tensors(), cuts=CUTS, limit=st.sampled_from([1, 64, 10**9]), threads=st.integers(1, 3))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_a_dcp_arrives_bit_for_bit(state: dict[str, torch.Tensor], cuts: list[int], limit: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = math.prod(cuts)
        source = save_dcp(Path(folder, "dcp"), state, ranks=ranks, cut=lambda _, tensor: cuts[: tensor.dim()])
        convert(source, Path(folder, "out"), max_shard_size=limit, threads=threads)
        assert describe(read_safetensors(Path(folder, "out"))) == describe(state)


@given(state=draw_tensors(), cuts=CUTS)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_sharded_safetensors_arrive_bit_for_bit(state: dict[str, torch.Tensor], cuts: list[int]) -> None:
    def cut(_: str, tensor: torch.Tensor) -> list[int]:
        # This layout keeps no global shape: of a cut tensor without elements only a part of it can be known.
        return cuts[: tensor.dim()] if tensor.numel() else []

    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        source = save_sharded_safetensors(Path(folder, "in"), contiguous, ranks=math.prod(cuts), cut=cut)
        convert(source, Path(folder, "out"))
        assert describe(read_safetensors(Path(folder, "out"))) == describe(state)
