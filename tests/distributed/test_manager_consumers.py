"""What the manager saves opens elsewhere, and computes what the live model computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.launcher import RankLauncher
from testbed.rank import RankContext
from testbed.saved_cases import SavedCases
from testbed.values import Case, MeshShape, Opened

pytestmark = pytest.mark.distributed


def open_with_transformers(context: RankContext, model: str, root: Path) -> Opened:
    from testbed.consumers import open_consolidated

    return open_consolidated(context, model, root)


def open_with_peft(context: RankContext, model: str, root: Path, base: Path) -> Opened:
    from testbed.consumers import open_adapter

    return open_adapter(context, model, root, base)


@pytest.mark.parametrize("model", ["llama", "qwen2_tied"])
def test_transformers_opens_what_was_consolidated_with_equal_logits(
    saved_cases: SavedCases, launcher: RankLauncher, model: str
) -> None:
    root, _ = saved_cases.find(Case(model, MeshShape(2, 2), with_keys=True))
    [opened] = launcher.run(open_with_transformers, model, root, ranks=1, group=False)
    assert opened.complaints == {}
    assert opened.largest_difference == 0.0
    assert opened.largest_logit > 0.1


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("mesh", [MeshShape(dp=4, ep=2), MeshShape(dp=4)], ids=str)
def test_transformers_opens_consolidated_experts_with_the_logits_of_automodels_own_class(
    saved_cases: SavedCases, launcher: RankLauncher, model: str, mesh: MeshShape
) -> None:
    root, _ = saved_cases.find(Case(model, mesh))
    [opened] = launcher.run(open_with_transformers, model, root, ranks=1, group=False)
    assert opened.complaints == {}
    # Two implementations of one model sum in different orders.
    assert opened.largest_difference < 1e-5
    assert opened.largest_logit > 0.1


def test_peft_opens_an_adapter_with_the_logits_of_the_live_model(
    saved_cases: SavedCases, launcher: RankLauncher, tmp_path: Path
) -> None:
    root, _ = saved_cases.find(Case("lora_llama", MeshShape(2, 2), ("safetensors",), with_keys=True))
    [opened] = launcher.run(open_with_peft, "lora_llama", root, tmp_path, ranks=1, group=False)
    assert opened.largest_difference < 1e-6
    assert opened.largest_logit > 0.1
