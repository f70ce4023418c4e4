from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlamaForCausalLM

SAVED = "torch_save/step_2/policy/weights/model"


@pytest.fixture
def demo() -> Iterator[ModuleType]:
    # Here, because importing the demo silences the libraries' loggers.
    from ckpt_verify.demo import main_job as module  # noqa: PLC0415

    yield module
    logging.disable(logging.NOTSET)


@torch.no_grad()
def scale_weights(model: torch.nn.Module, factor: float) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.mul_(factor)
    return model


def save_after_training(root: Path, demo: ModuleType, *, saved_factor: float) -> None:
    """Keep the logits of a model that training doubled; save it with weights of another factor."""
    demo.make_base_model(root / "base")
    trained = scale_weights(LlamaForCausalLM.from_pretrained(root / "base"), 2)
    torch.save(demo.compute_logits(trained, demo.read_tokens(root / "base")), root / "logits.pt")
    saved = scale_weights(LlamaForCausalLM.from_pretrained(root / "base"), saved_factor)
    save(saved.state_dict(), storage_writer=FileSystemWriter(root / SAVED), no_dist=True)


@pytest.mark.parametrize(("saved_factor", "equal"), [(2, True), (2.25, False)])
def test_only_a_save_of_the_trained_model_has_its_logits(
    tmp_path: Path, demo: ModuleType, saved_factor: float, *, equal: bool
) -> None:
    save_after_training(tmp_path, demo, saved_factor=saved_factor)
    outcome = demo.carry_over(tmp_path, "torch_save")
    assert outcome.compared_equal
    assert (outcome.logits_equal, outcome.is_equal) == (equal, equal)
    assert demo.measure_difference(tmp_path, "base") > 0


def test_different_tensors_are_no_success_even_with_equal_logits(demo: ModuleType) -> None:
    assert not demo.Outcome("torch_save", 1.0, compared_equal=False, largest_difference=0.0).is_equal


def test_without_the_training_stack_the_demo_says_what_to_install() -> None:
    program = (
        "import runpy, sys\n"
        "sys.modules['nemo_automodel'] = None  # as if it were not installed\n"
        "runpy.run_module('ckpt_verify.demo', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603  our own
    assert (done.returncode, done.stdout) == (2, "")
    (message,) = done.stderr.splitlines()
    assert message.startswith("python -m ckpt_verify.demo: ")
    assert "install ckpt-verify[demo]" in message
    assert "nemo_automodel" in message
