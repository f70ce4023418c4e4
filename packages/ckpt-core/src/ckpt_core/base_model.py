"""Load the weights that training starts from, and see that they fill the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from ckpt_core import automodel_compat as compat
from ckpt_core.collective import Step, agree, on_rank_zero
from ckpt_core.errors import CorruptCheckpointError, KeyMismatchError, LoadError, Problem
from ckpt_core.key_mapping import is_extra_state
from ckpt_core.layout import CheckpointLayout, detect_layout
from ckpt_core.reader import open_checkpoint
from ckpt_core.stored_state import require_equal_head

_log = logging.getLogger(__name__)


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
    on_rank_zero(step, lambda: _require_complete(Path(path), model, checkpointer.config))
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


def _require_complete(path: Path, model: nn.Module, config: Any) -> None:  # noqa: ANN401
    """Refuse a base model that does not fill `model`; releases before 0.7 leave the rest random.

    Only where names are not converted can this be told from names; the rest is the library's.
    """
    if compat.renames_base(model) or detect_layout(path).layout is not CheckpointLayout.SAFETENSORS:
        return
    reader = open_checkpoint(path)
    errors = [problem for problem in reader.check() if problem.severity == "error"]
    if errors:
        raise CorruptCheckpointError(f"{path}: is not a complete base model; fetch it again", problems=errors)
    stored = reader.tensors.keys()
    prefix = compat.base_prefix(model)
    tied = compat.find_tied_head(model)
    known = stored | {f"{prefix}{name}" for name in stored} | ({tied[0]} if tied else set())
    wanted = compat.base_names(model, config)
    unused = stored - wanted - {name.removeprefix(prefix) for name in wanted} - ({tied[0]} if tied else set())
    if unused:
        _log.warning("%s: %d tensors have no place in the model, such as %r", path, len(unused), min(unused))
    missing = sorted(name for name in wanted - known if not is_extra_state(name))
    if missing:
        problems = [Problem("missing_tensor", name, "in the model, not in the base model") for name in missing]
        raise KeyMismatchError(f"{path}: does not hold all parameters of the model", problems=problems)
    if tied is not None and tied[1] is not None and tied[0] in stored:
        require_equal_head(path, tied[0], tied[1])


def _call(checkpointer: Any, model: nn.Module, cache: str, path: str) -> None:  # noqa: ANN401
    device = compat.model_device(model)
    checkpointer.load_base_model(model, device=device, root_dir=cache, model_name=path, load_base_model=True)


def _require_values(model: nn.Module, path: str) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise LoadError(f"{path}: {len(empty)} tensors have no values after loading, such as {empty[0]!r}")
