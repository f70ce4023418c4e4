"""Asynchronous saves, with real background processes.

The stager copies through CPU memory instead of pinned memory, because there may be no
accelerator here; everything after the copy is what runs on one.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from testbed.launcher import RankLauncher
from testbed.rank import RankContext

if TYPE_CHECKING:
    import torch
    from ckpt_core.manager import AutomodelCheckpointManager

pytestmark = pytest.mark.distributed


def _build() -> tuple[torch.nn.Module, AutomodelCheckpointManager]:
    """Build a sharded model, and a manager that believes in an accelerator."""
    import torch
    from ckpt_core import automodel_compat as compat
    from ckpt_core.manager import AutomodelCheckpointManager
    from nemo_automodel.components.checkpoint import checkpointing
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def stage_on_cpu() -> DefaultStager:
        return DefaultStager(StagingOptions(False, False, True, False))

    # Ranks of this launcher are daemons, which multiprocessing allows no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    checkpointing.DefaultStager = stage_on_cpu
    compat.has_accelerator = lambda: True
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 4)
    fully_shard(model, mesh=mesh)
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer()
    return model, manager


def _save_then_change(_context: RankContext, root: str) -> dict[str, list[bool]]:
    """Save asynchronously, change the weights at once, and look at what is there at each moment."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    model, manager = _build()
    target = Path(root, "weights", "model")
    seen: dict[str, list[bool]] = {}

    def save(value: float, *, is_async: bool, consolidated: bool = False) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        config = {"is_async": is_async, "save_consolidated": consolidated}
        manager.save_checkpoint(model, f"{root}/weights", checkpointing_cfg=config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1.0)

    def full(parameter: torch.Tensor) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.full_tensor()

    def holds(value: float) -> bool:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-2.0)
        manager.load_checkpoint(model, f"{root}/weights")
        return all(bool((full(p) == value).all()) for p in model.parameters())

    save(1.0, is_async=True)
    dist.barrier()
    seen["there at once"] = [target.exists()]
    manager.close()
    seen["there after close"] = [target.exists(), holds(1.0)]
    save(2.0, is_async=True)
    seen["a load publishes first"] = [holds(2.0)]
    save(3.0, is_async=True)
    save(4.0, is_async=False)
    seen["a save publishes first, and can be synchronous again"] = [holds(4.0)]
    save(5.0, is_async=True)
    manager.close()
    seen["asynchronous again"] = [holds(5.0)]
    seen["nothing is left beside it"] = [[path.name for path in target.parent.iterdir()] == ["model"]]
    save(6.0, is_async=True, consolidated=True)
    for _ in range(200):
        # Training goes on; a background thread must not meet these in the default group.
        dist.all_reduce(torch.ones(1))
    manager.close()
    seen["consolidated in the background"] = [holds(6.0), (target / "consolidated").is_dir()]
    save(7.0, is_async=True)
    dist.destroy_process_group()
    manager.close()
    seen["published by one rank when the group is gone"] = [_wait_for_publication(target)]
    return seen


def _wait_for_publication(target: Path) -> bool:
    """Wait for the rank that publishes: without a group nobody says when it is done."""
    from ckpt_core import open_checkpoint, read_tensor

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        reader = open_checkpoint(target)
        if not reader.check() and bool((read_tensor(reader, "weight") == 7.0).all()):
            return True
        time.sleep(0.1)
    return False


def test_an_asynchronous_save_is_a_snapshot_that_is_published_later(launcher: RankLauncher, tmp_path: Path) -> None:
    expected = {
        "there at once": [False],
        "there after close": [True, True],
        "a load publishes first": [True],
        "a save publishes first, and can be synchronous again": [True],
        "asynchronous again": [True],
        "nothing is left beside it": [True],
        "consolidated in the background": [True, True],
        "published by one rank when the group is gone": [True],
    }
    assert launcher.run(_save_then_change, str(tmp_path), ranks=2, timeout=300) == [expected] * 2
