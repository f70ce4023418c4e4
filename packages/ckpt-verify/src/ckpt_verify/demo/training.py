"""A training job on a mesh, as small as it gets: the code that a NeMo RL worker has too."""

from __future__ import annotations

import warnings
from multiprocessing import set_forkserver_preload
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_core.manager import AutomodelCheckpointManager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import start_processes
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from ckpt_verify.demo.base_model import compute_logits, read_tokens

FORMATS = ("torch_save", "safetensors")
MESH = {"dp": 2, "tp": 2}
STEPS = 2
WORLD = 4
"""Processes: one for each place in the mesh."""
TENSOR_PARALLEL = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def run_training(root: Path) -> None:
    """Start one process for each place in the mesh; raises if one of them fails."""
    # Forked from a server that has done the imports, which take longer than the training.
    set_forkserver_preload([__name__])
    start_processes(_train_and_save, (root,), WORLD, start_method="forkserver")  # type: ignore[no-untyped-call]  # torch


def _train_and_save(rank: int, root: Path) -> None:
    """Be one process of the job."""
    disable_progress_bar()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    model = _shard_model(root / "base", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = read_tokens(root / "base").roll(mesh["dp"].get_local_rank())
    for step in range(1, STEPS + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    _remember_logits(model, root)
    for saved_as in FORMATS:
        _save(root, saved_as, mesh, model, optimizer)
    dist.destroy_process_group()


def _shard_model(base: Path, mesh: DeviceMesh) -> torch.nn.Module:
    """Split the base model over `tp`, then over `dp`."""
    model: torch.nn.Module = LlamaForCausalLM.from_pretrained(base)
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    fully_shard(model, mesh=mesh["dp"])
    return model


def _save(
    root: Path, saved_as: str, mesh: DeviceMesh, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Save as a policy worker of NeMo RL does: one manager, one call."""
    policy = root / saved_as / f"step_{STEPS}" / "policy"
    manager = AutomodelCheckpointManager(dp_mesh=mesh["dp"], tp_mesh=mesh["tp"])
    manager.init_checkpointer({"model_repo_id": str(root / "base"), "model_save_format": saved_as}, str(policy))
    manager.save_checkpoint(
        model,
        str(policy / "weights"),
        optimizer=optimizer,
        optimizer_path=str(policy / "optimizer"),
        tokenizer=AutoTokenizer.from_pretrained(root / "base"),
        tokenizer_path=str(policy / "tokenizer"),
        checkpointing_cfg={"enabled": True, "model_save_format": saved_as, "save_consolidated": False},
    )


def _remember_logits(model: torch.nn.Module, root: Path) -> None:
    """Gather the sharded weights into a plain model and keep its logits."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain = LlamaForCausalLM.from_pretrained(root / "base")
        plain.load_state_dict(weights)
        torch.save(compute_logits(plain, read_tokens(root / "base")), root / "logits.pt")
