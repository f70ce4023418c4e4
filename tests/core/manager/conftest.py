"""What the manager promises beyond the interface, numbered, on one real rank.

 1  private names of nemo_automodel are never relied on blindly
 2  arguments that a release lacks are not passed to it
 3  updates are normalized as the constructor does; unknown or impossible ones are refused
 4  no CUDA is needed; the default cache is the hub's
 5  a base model fills the model, or the load fails
 6  nothing of one save decides how the next one is written
 7  what a directory holds is told by its content, and two answers are refused
 8  a load is checked completely before a parameter changes
 9  a save leaves no stale files
10  formats can alternate in one process
11  every failure is an Exception, with its cause
12  an asynchronous save without an accelerator is refused before anything is made
13  paths of any spelling mean the same in save and load
14  the tokenizer is written once; keys are enforced
15  the supported releases are declared

The tests carry the number in their names. What several ranks do is in tests/distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from ckpt_core.manager import AutomodelCheckpointManager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of one real rank, over a rendezvous that no other run can meet."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture
def manager(mesh: DeviceMesh) -> AutomodelCheckpointManager:
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer()
    return manager
