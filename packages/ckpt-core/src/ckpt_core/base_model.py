"""Load the weights that training starts from, and see that they fill the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ckpt_core import automodel_compat as compat
from ckpt_core.collective import Step, agree, on_rank_zero
from ckpt_core.errors import LoadError


def load_base_model(
    checkpointer: Any,  # noqa: ANN401  nemo_automodel is not typed
    model: nn.Module,
    model_name: str,
    hf_cache_dir: str | None,
    peft_init_method: str | None,
) -> None:
    """Load a Hugging Face model into `model`, whose parameters may still be on meta.

    Args:
        checkpointer: nemo_automodel's; its configuration must name the base model.
        model: Sharded or plain.
        model_name: A local directory, or a repository id that is in the cache.
        hf_cache_dir: The hub cache; None for the default one.
        peft_init_method: How to initialize adapters; None leaves them.

    Raises:
        CheckpointNotFoundError: If the base model is not on this machine.
        LoadError: If loading failed or left parameters without values, on every rank.
    """
    if not compat.is_real(checkpointer):
        _call(checkpointer, model, hf_cache_dir or compat.HF_HUB_CACHE, model_name)
        return
    step = Step(f"{model_name}: could not be loaded as base model", LoadError)
    path, cache = on_rank_zero(step, lambda: compat.resolve_base_model(model_name, hf_cache_dir))
    # The adapter's names are not in a base model; the library skips them only if told so.
    checkpointer.config.is_peft = compat.has_lora(model)
    agree(step, lambda: _prepare(checkpointer, model, peft_init_method))
    agree(step, lambda: compat.require_base_keys(model, path, is_peft=checkpointer.config.is_peft))
    agree(step, lambda: _call(checkpointer, model, cache, path))
    agree(step, lambda: _require_values(model, path))


def _prepare(checkpointer: Any, model: nn.Module, peft_init_method: str | None) -> None:  # noqa: ANN401
    """Give every parameter storage and, where the loading will not fill it, a value."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        checkpointer.initialize_model_weights(model, compat.model_device(model), peft_init_method=peft_init_method)
    elif peft_init_method is not None:
        for module in model.modules():
            initialize = getattr(module, "init_lora_weights", None)
            if callable(initialize):
                initialize(peft_init_method)


def _call(checkpointer: Any, model: nn.Module, cache: str, path: str) -> None:  # noqa: ANN401
    device = compat.model_device(model)
    checkpointer.load_base_model(model, device=device, root_dir=cache, model_name=path, load_base_model=True)


def _require_values(model: nn.Module, path: str) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise LoadError(f"{path}: {len(empty)} tensors have no values after loading, such as {empty[0]!r}")
