"""Saves and loads of a run through the manager, as a training loop makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ckpt_core.errors import CheckpointError
from ckpt_core.manager import AutomodelCheckpointManager
from torch.distributed.tensor import DTensor

from testbed.rank import RankContext
from testbed.training import (
    Run,
    Snapshot,
    compare_snapshots,
    read_snapshot,
    start_run,
    take_snapshot,
    train_steps,
    write_snapshot,
)
from testbed.values import Case, Failed, Loaded, MeshShape, Saved

FORMATS: dict[str, dict[str, Any]] = {
    "torch_save": {"model_save_format": "torch_save", "save_consolidated": False},
    "safetensors": {"model_save_format": "safetensors", "save_consolidated": False},
    "consolidated": {"model_save_format": "safetensors", "save_consolidated": True},
}
"""What a training loop writes in its configuration, by the name of the directory it goes to."""

EXPECTED = "expected.pt"
"""A snapshot of the live run, gathered before its first save: what every load must bring back."""

SAVED_SEED = 1
LOADED_SEED = 2
_STEPS = 3
_NEXT_STEPS = 2
_DATA_SEED = 100
_OTHER_DATA_SEED = 900


def build_manager(run: Run, root: Path, *, with_keys: bool = False) -> AutomodelCheckpointManager:
    """Create the manager of a training loop, which may know the whole model's keys."""
    keys = run.keys if with_keys else None
    manager = AutomodelCheckpointManager(run.meshes.dp, run.meshes.tp, keys, run.meshes.moe)
    manager.init_checkpointer(
        # Consolidating managers synchronize writes in a process group of their own.
        config_updates={
            "model_repo_id": "tiny/model",
            "model_cache_dir": str(root),
            "is_peft": run.is_peft,
            "save_consolidated": True,
        },
        checkpoint_root=str(root),
    )
    return manager


def save_run(manager: AutomodelCheckpointManager, run: Run, step: Path, options: dict[str, Any]) -> None:
    """Save a run under a step's directory."""
    manager.save_checkpoint(
        run.model,
        weights_path=str(step / "policy" / "weights"),
        optimizer=run.optimizer,
        optimizer_path=str(step / "policy" / "optimizer"),
        scheduler=run.scheduler,
        # Keys of the training loop's own configuration come along.
        checkpointing_cfg={"enabled": True, "metric_name": "val_loss", "keep_top_k": 3, **options},
        lora_enabled=run.is_peft,
        peft_config=run.architecture.peft_config,
    )


def load_run(manager: AutomodelCheckpointManager, run: Run, step: Path) -> None:
    """Load a run from a step's directory."""
    manager.load_checkpoint(
        run.model,
        weights_path=str(step / "policy" / "weights"),
        optimizer=run.optimizer,
        optimizer_path=str(step / "policy" / "optimizer"),
        scheduler=run.scheduler,
    )


def start_saved_run(name: str, shape: MeshShape) -> Run:
    """Train the run that is saved, up to its save."""
    run = start_run(name, shape, SAVED_SEED)
    train_steps(run, _STEPS, _DATA_SEED)
    return run


def start_other_run(name: str, shape: MeshShape) -> Run:
    """Start a run that has nothing in common with the saved one but its architecture.

    It has optimizer state of its own, so that whatever a load leaves alone shows.
    """
    run = start_run(name, shape, LOADED_SEED)
    train_steps(run, 1, _OTHER_DATA_SEED)
    return run


def continue_run(run: Run) -> list[float]:
    """Train on after the save; the second loss depends on the optimizer's state as well."""
    return train_steps(run, _NEXT_STEPS, _DATA_SEED + _STEPS)


def save_formats(_context: RankContext, case: Case, root: Path) -> Saved:
    """Train a run, write what a load must bring back, and save the run in each format with one manager."""
    run = start_saved_run(case.model, case.mesh)
    expected = take_snapshot(run)
    write_snapshot(expected, root / EXPECTED)
    manager = build_manager(run, root, with_keys=case.with_keys)
    for format_name in case.formats:
        save_run(manager, run, root / format_name, FORMATS[format_name])
    changes = compare_snapshots(expected, take_snapshot(run))
    return Saved(changes, continue_run(run))


def load_formats(_context: RankContext, case: Case, shape: MeshShape, root: Path) -> dict[str, Loaded]:
    """Load each format into a run of its own."""
    return {format_name: _load_format(case, shape, root, format_name) for format_name in case.formats}


def _load_format(case: Case, shape: MeshShape, root: Path, format_name: str) -> Loaded:
    run = start_other_run(case.model, shape)
    manager = build_manager(run, root, with_keys=case.with_keys)
    scale_frozen(run, 2.0)
    load_run(manager, run, root / format_name)
    expected = _double_frozen(run, read_snapshot(root / EXPECTED))
    differences = compare_snapshots(expected, take_snapshot(run))
    scale_frozen(run, 0.5)
    return Loaded(differences, continue_run(run))


def load_weights_only(_context: RankContext, case: Case, shape: MeshShape, root: Path) -> Loaded:
    """Load the first format without optimizer and scheduler."""
    run = start_other_run(case.model, shape)
    build_manager(run, root).load_checkpoint(run.model, str(root / case.formats[0] / "policy" / "weights"))
    differences = compare_snapshots(read_snapshot(root / EXPECTED), take_snapshot(run))
    return Loaded(differences, continue_run(run))


def scale_frozen(run: Run, factor: float) -> None:
    """Multiply what does not train by a power of two, exactly.

    An adapter's checkpoint must not touch its base: a base that was doubled before a load is
    still double after it, and can be halved back to what the adapter was trained on.
    """
    with torch.no_grad():
        for parameter in run.model.parameters():
            if not parameter.requires_grad:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.mul_(factor)


def _double_frozen(run: Run, expected: Snapshot) -> Snapshot:
    frozen = {f"model.{name}" for name, parameter in run.model.named_parameters() if not parameter.requires_grad}
    return {name: _double(value) if name in frozen else value for name, value in expected.items()}


def _double(value: torch.Tensor | str) -> torch.Tensor | str:
    return value if isinstance(value, str) else value * 2.0


def report_failure(run: Run, work: Callable[[], None]) -> Failed:
    """Make a call that must fail, and see whether it changed the run."""
    before = take_snapshot(run)
    try:
        work()
    except CheckpointError as error:
        # The snapshot is a collective: it shows as well that no rank is left behind in another one.
        changes = compare_snapshots(before, take_snapshot(run))
        return Failed(type(error).__name__, str(error), changes)
    return Failed("nothing", "the call succeeded", [])


def refuse_load(_context: RankContext, case: Case, shape: MeshShape, root: Path) -> Failed:
    """Load what does not fit, from the first format."""
    run = start_other_run(case.model, shape)
    manager = build_manager(run, root)
    return report_failure(run, lambda: load_run(manager, run, root / case.formats[0]))


def load_base(_context: RankContext, name: str, shape: MeshShape, root: Path) -> list[str]:
    """Start from a consolidated checkpoint as from any base model; say what differs from the live model."""
    run = start_run(name, shape, LOADED_SEED)
    before = take_snapshot(run)
    base = root / "consolidated" / "policy" / "weights" / "model" / "consolidated"
    build_manager(run, root).load_base_model(run.model, str(base))
    saved = read_snapshot(root / EXPECTED)
    # Adapters, the optimizer and the scheduler are not the base's.
    expected = {key: saved.get(key, value) if key.startswith("model.") else value for key, value in before.items()}
    return compare_snapshots(expected, take_snapshot(run))
