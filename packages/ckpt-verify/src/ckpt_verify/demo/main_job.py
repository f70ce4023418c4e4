"""Train and save, then take each save to a folder that transformers opens."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ckpt_verify.demo.base_model import compute_logits, make_base_model, read_tokens
from ckpt_verify.demo.training import FORMATS, MESH, STEPS, run_training


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one save: a row of the last table."""

    saved_as: str
    convert_seconds: float
    """Wall time of the command, start of its process included."""
    compared_equal: bool
    largest_difference: float
    """Between the logits of the trained model and those of the opened one."""

    @property
    def logits_equal(self) -> bool:
        """Whether the logits are the same, bit for bit."""
        return self.largest_difference == 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing at all was lost."""
        return self.compared_equal and self.logits_equal


def run_demo(root: Path) -> int:
    """Train and save in `root`, carry each save over, print what came of it."""
    disable_progress_bar()
    make_base_model(root / "base")
    mesh = " x ".join(f"{name} {size}" for name, size in MESH.items())
    say(f"Train {STEPS} steps on a mesh of {mesh} processes, save as {' and as '.join(FORMATS)}")
    run_training(root)
    outcomes = [carry_over(root, saved_as) for saved_as in FORMATS]
    say("Is what transformers opened the model that was trained?")
    print_table(outcomes)
    print(f"\nThe base model, before training, differs by up to {measure_difference(root, 'base'):.3g}.")
    return 0 if all(outcome.is_equal for outcome in outcomes) else 1


def carry_over(root: Path, saved_as: str) -> Outcome:
    """Inspect, convert, compare and open one save."""
    saved, opened = f"{saved_as}/step_{STEPS}/policy/weights/model", f"{saved_as}/for_transformers"
    say(f"From {saved_as} to a folder that transformers opens")
    run_tool(root, "ckpt-inspect", saved)
    started = time.perf_counter()
    run_tool(root, "ckpt-convert", saved, opened, "--assets", "base").check_returncode()
    seconds = time.perf_counter() - started
    compared = run_tool(root, "ckpt-verify", "compare", saved, opened)
    return Outcome(saved_as, seconds, compared.returncode == 0, measure_difference(root, opened))


def measure_difference(root: Path, folder: str) -> float:
    """Open a model folder; return how far its logits are from those of the trained model."""
    opened = AutoModelForCausalLM.from_pretrained(root / folder)
    logits = compute_logits(opened, read_tokens(root / folder))
    return float((logits - torch.load(root / "logits.pt")).abs().max())


def run_tool(root: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Show a command as one types it, run it in `root`, let its output through."""
    print("$", *command, flush=True)
    script = Path(sys.executable).with_name(command[0])
    return subprocess.run([script, *command[1:]], cwd=root, check=False)  # noqa: S603  our own console scripts


def say(title: str) -> None:
    """Print the title of a part."""
    print(f"\n== {title}", flush=True)


def print_table(outcomes: list[Outcome]) -> None:
    """Print one row for each save."""
    print(f"{'saved as':<12} {'converted in':>12}  {'tensors':<10} {'logits':<10} {'largest difference':>18}")
    for row in outcomes:
        tensors, logits = ("equal" if equal else "DIFFERENT" for equal in (row.compared_equal, row.logits_equal))
        seconds = f"{row.convert_seconds:.1f} s"
        print(f"{row.saved_as:<12} {seconds:>12}  {tensors:<10} {logits:<10} {row.largest_difference:>18g}")
