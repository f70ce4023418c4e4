"""Models that one rank trains, and how tests save, load and compare them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ckpt_core.manager import AutomodelCheckpointManager
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

FORMATS = ["torch_save", "safetensors"]


class Odd(nn.Module):
    """Uneven, 0-dim, integer and transient tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.deep = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("count", torch.randint(1, 1000, ()))
        self.register_buffer("transient", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.deep(self.wide(x)) * self.scale
        return result


class Trained:
    """A model with an optimizer and a scheduler that have stepped."""

    def __init__(self, seed: int, build: Callable[[], nn.Module] = Odd, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = build()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        for _ in range(steps):
            self.step()

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.linspace(-1, 1, 14).reshape(2, 7)).square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        return copy.deepcopy(state | {"sched": self.scheduler.state_dict()})


def build_lora() -> nn.Module:
    model = Odd()
    apply_lora_to_linear_modules(model, PEFT)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.uniform_(parameter)
    return model


PEFT = PeftConfig(target_modules=["*wide"], dim=2, alpha=4, use_triton=False)


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def save(manager: AutomodelCheckpointManager, trained: Trained, root: Path, **config: object) -> None:
    manager.save_checkpoint(
        trained.model,
        str(root / "weights"),
        trained.optimizer,
        str(root / "optimizer"),
        trained.scheduler,
        checkpointing_cfg=config,
    )


def load(manager: AutomodelCheckpointManager, trained: Trained, root: Path) -> None:
    manager.load_checkpoint(
        trained.model, str(root / "weights"), trained.optimizer, str(root / "optimizer"), trained.scheduler
    )


def build_llama(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config)


def drop_file(model: Path) -> None:
    next(p for p in model.iterdir() if p.suffix in {".distcp", ".safetensors"}).unlink()


KEYS = list(Odd().state_dict())
