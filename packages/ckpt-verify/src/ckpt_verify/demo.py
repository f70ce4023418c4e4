"""The main job, start to end, on a model that takes seconds: `python -m ckpt_verify.demo [DIRECTORY]`.

A tiny Llama trains two steps on a 2x2 mesh of real processes (FSDP2 over `dp`, tensor
parallel over `tp`) and is saved in both formats that nemo_automodel knows. Each save is
then inspected, converted, compared with the result, and opened with transformers. The
logits of what was opened have to equal those of the trained model, gathered in memory: no
checkpoint takes part in what is expected.

Everything is made here; nothing is downloaded. With DIRECTORY the files are kept there.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

FORMATS = ("torch_save", "safetensors")
MESH = (2, 2)
STEPS = 2
TEXT = "a checkpoint is the model that is left when the job is over"
TENSOR_PARALLEL = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one save: a row of the last table."""

    saved_as: str
    convert_seconds: float
    """Wall time of the command, start of its process included."""
    compared_equal: bool
    largest_difference: float
    """Between the logits of the trained model and of the opened one."""

    @property
    def is_equal(self) -> bool:
        """Whether tensors and logits are the same, bit for bit."""
        return self.compared_equal and self.largest_difference == 0


def main() -> int:
    """Run the demo; 0 if everything came out equal, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_verify.demo", description="The main job on a tiny model.")
    parser.add_argument("directory", nargs="?", type=Path, help="a new directory to keep the files in")
    directory: Path | None = parser.parse_args().directory
    if directory is not None:
        directory.mkdir(parents=True)
        return run_demo(directory.resolve())
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as temporary:
        return run_demo(Path(temporary))


def run_demo(root: Path) -> int:
    """Train and save, take each format through the whole job, print what came of it."""
    quieten_libraries()
    make_base_model(root / "base")
    say(f"Train {STEPS} steps on a mesh of dp {MESH[0]} x tp {MESH[1]} processes, save as {' and as '.join(FORMATS)}")
    spawn(train_and_save, args=(root,), nprocs=MESH[0] * MESH[1])  # type: ignore[no-untyped-call]  # torch has no types here
    outcomes = [carry_over(root, saved_as) for saved_as in FORMATS]
    say("Is what transformers opened the model that was trained?")
    print_table(outcomes)
    return 0 if all(outcome.is_equal for outcome in outcomes) else 1


def make_base_model(directory: Path) -> None:
    """Write an untrained Llama with a word tokenizer, as a folder that transformers opens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def train_and_save(rank: int, root: Path) -> None:
    """Be one process of the training job."""
    quieten_libraries()
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=MESH[0] * MESH[1])
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))
    model = shard_model(root / "base", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = read_tokens(root / "base").roll(mesh["dp"].get_local_rank())
    for step in range(1, STEPS + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    remember_logits(model, root)
    for saved_as in FORMATS:
        save(model, optimizer, mesh, root, saved_as)
    dist.destroy_process_group()


def shard_model(base: Path, mesh: DeviceMesh) -> torch.nn.Module:
    """Read the base model, split it over `tp`, then over `dp`."""
    model: torch.nn.Module = LlamaForCausalLM.from_pretrained(base)
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    fully_shard(model, mesh=mesh["dp"])
    return model


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, root: Path, saved_as: str) -> None:
    """Save as a NeMo RL policy worker does: one manager, one call."""
    # Brings in nemo_automodel, which takes seconds and which only the training processes need.
    from ckpt_core.manager import AutomodelCheckpointManager  # noqa: PLC0415

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


def remember_logits(model: torch.nn.Module, root: Path) -> None:
    """Gather the sharded weights into a plain model and keep its logits."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain = LlamaForCausalLM.from_pretrained(root / "base")
        plain.load_state_dict(weights)
        torch.save(compute_logits(plain, read_tokens(root / "base")), root / "logits.pt")


def carry_over(root: Path, saved_as: str) -> Outcome:
    """Inspect, convert, compare and open one save."""
    saved, opened = f"{saved_as}/step_{STEPS}/policy/weights/model", f"{saved_as}/for_transformers"
    say(f"From {saved_as} to a folder that transformers opens")
    run_tool(root, "ckpt-inspect", saved)
    started = time.perf_counter()
    run_tool(root, "ckpt-convert", saved, opened, "--assets", "base").check_returncode()
    seconds = time.perf_counter() - started
    compared = run_tool(root, "ckpt-verify", "compare", saved, opened)
    logits = compute_logits(AutoModelForCausalLM.from_pretrained(root / opened), read_tokens(root / opened))
    difference = (logits - torch.load(root / "logits.pt")).abs().max().item()
    return Outcome(saved_as, seconds, compared.returncode == 0, difference)


def read_tokens(folder: Path) -> torch.Tensor:
    """Tokenize `TEXT` with the tokenizer of a model folder; int64 of shape (1, words)."""
    tokens: torch.Tensor = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    return tokens


@torch.no_grad()
def compute_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Compute float32 logits of shape (1, words, vocabulary)."""
    logits: torch.Tensor = model.eval()(input_ids=tokens).logits
    return logits


def run_tool(root: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Show a command as one types it, run it in `root`, let its output through."""
    print("$", *command, flush=True)
    script = Path(sys.executable).with_name(command[0])
    return subprocess.run([script, *command[1:]], cwd=root, check=False)  # noqa: S603  our own console scripts


def quieten_libraries() -> None:
    """Keep progress bars, and hints on speed and optional parts, out of the story."""
    disable_progress_bar()
    logging.disable(logging.WARNING)


def say(title: str) -> None:
    """Print the title of a part."""
    print(f"\n== {title}", flush=True)


def print_table(outcomes: list[Outcome]) -> None:
    """Print one row per format."""
    print(f"{'saved as':<12} {'converted in':>12}  {'tensors':<10} {'logits':<10} {'largest difference':>18}")
    for row in outcomes:
        tensors = "equal" if row.compared_equal else "DIFFERENT"
        logits = "equal" if row.largest_difference == 0 else "DIFFERENT"
        seconds = f"{row.convert_seconds:.1f} s"
        print(f"{row.saved_as:<12} {seconds:>12}  {tensors:<10} {logits:<10} {row.largest_difference:>18g}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # four processes share the cores
    sys.exit(main())
