"""Everything that differs between nemo_automodel releases, or is private in them.

Releases 0.5 to 0.7 moved `_should_write_hf_metadata` from a method to a function, added
arguments to the state wrappers, and left several things that a manager needs without a
public name. They are resolved here, once; `manager` states policy in these terms only.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from nemo_automodel.components.checkpoint import checkpointing as _checkpointing
from nemo_automodel.components.checkpoint import stateful_wrappers as _wrappers
from nemo_automodel.components.checkpoint._backports.filesystem import SerializationFormat
from nemo_automodel.components.checkpoint.addons import ConsolidatedHFAddon, PeftAddon
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from torch import nn
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_core.errors import CheckpointNotFoundError, ConfigError

__all__ = [
    "Checkpointer",
    "CheckpointingConfig",
    "adapt_names",
    "call_supported",
    "clear_plan_caches",
    "find_tied_head",
    "has_accelerator",
    "has_lora",
    "is_real",
    "make_addons",
    "model_device",
    "model_state_dict",
    "native_names",
    "normalize_option",
    "optimizer_state_dict",
    "require_optimizer_path",
    "resolve_base_model",
]

_ADAPTER_OPTIONS = ("v4_compatible", "legacy_paramwrapper_layout")


def is_real(checkpointer: object) -> bool:
    """Whether `checkpointer` is nemo_automodel's, and not a double that writes nothing."""
    return isinstance(checkpointer, Checkpointer)


def call_supported(function: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401  the callee's types
    """Call `function` with those of `options` that this release's signature names."""
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in options.items() if name in known})


def normalize_option(name: str, value: object) -> object:
    """Bring a configuration value into the form that `CheckpointingConfig` would store.

    Setting a field on an existing configuration skips `__post_init__`, and a plain `True`
    for `save_consolidated` then matches none of the enum's members: nothing is consolidated.

    Raises:
        ConfigError: If this release knows no such field, or not this value.
    """
    known = {field.name for field in dataclasses.fields(CheckpointingConfig)}
    if name not in known:
        raise ConfigError(f"unknown checkpointing option {name!r}; this nemo_automodel knows {sorted(known)}")
    if name == "model_save_format":
        return _save_format(value)
    if name == "save_consolidated":
        try:
            return CheckpointingConfig(save_consolidated=value).save_consolidated
        except ValueError as error:
            raise ConfigError(f"save_consolidated={value!r}: {error}") from None
    return value


def _save_format(value: object) -> SerializationFormat:
    text = value.value if isinstance(value, SerializationFormat) else value
    for member in SerializationFormat:
        if isinstance(text, str) and text.lower() == member.value:
            return member
    known = [member.value for member in SerializationFormat]
    raise ConfigError(f"model_save_format={value!r} is not one of {known}")


def make_addons(config: CheckpointingConfig) -> list[object]:
    """Build the list that `Checkpointer.__init__` would build for `config`."""
    writes_hf = config.model_save_format == SerializationFormat.SAFETENSORS and not config.is_peft
    addons: list[object] = [ConsolidatedHFAddon()] if writes_hf else []
    return [*addons, PeftAddon()] if config.is_peft else addons


def clear_plan_caches() -> None:
    """Forget the save plans that DCP keeps for the whole process.

    A plan cached for one format breaks the next save in the other one, and in some
    releases even a save by another Checkpointer.
    """
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(value, dict):
            value.clear()


def has_accelerator() -> bool:
    """Whether there is a device to stage asynchronous saves from."""
    return torch.accelerator.is_available()


def has_lora(model: nn.Module) -> bool:
    """Whether any trainable parameter belongs to an adapter."""
    return any("lora_" in name and parameter.requires_grad for name, parameter in model.named_parameters())


def model_device(model: nn.Module) -> torch.device:
    """Where the parameters are or, while they are on meta, where they should go."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def model_state_dict(model: nn.Module, *, is_peft: bool, is_init_step: bool = False, moe: bool = False) -> Any:  # noqa: ANN401
    """The state dict under native names, as the Checkpointer would start from.

    With PEFT this is a collective; the tensors are then on rank 0 only.
    """
    state = call_supported(
        _wrappers.ModelState, model, is_peft=is_peft, is_init_step=is_init_step, has_expert_parallelism=moe
    )
    return state.state_dict()


def adapt_names(model: nn.Module, state_dict: Any, config: Any, moe_mesh: Any) -> Any:  # noqa: ANN401
    """Turn native names and shapes into stored ones where the model's class has an adapter."""
    adapter = getattr(_unwrap_ddp(model), "state_dict_adapter", None)
    if not adapter:
        return state_dict
    options = {name: getattr(config, name) for name in _ADAPTER_OPTIONS if hasattr(config, name)}
    return adapter.to_hf(
        state_dict, exclude_key_regex=r".*_extra_state.*", quantization=False, device_mesh=moe_mesh, **options
    )


def native_names(model: nn.Module) -> frozenset[str]:
    """Names of `model.state_dict()` without the prefixes of wrappers."""
    return frozenset(_wrappers.get_model_state_dict(model))


def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object, *, is_peft: bool, moe: bool
) -> Any:  # noqa: ANN401
    """The nested state dict that the Checkpointer saves under `optim/`.

    An optimizer that has not stepped yet gets zero state by this, as on a real save.
    """
    state = call_supported(
        _wrappers.OptimizerState, model, optimizer, scheduler, is_peft=is_peft, has_expert_parallelism=moe
    )
    return state.state_dict()


def find_tied_head(model: nn.Module) -> tuple[str, str | None] | None:
    """Name of the output head that the configuration ties to the input embedding.

    Returns:
        `(head, embedding)` by native names, `embedding` None while the two are no longer
        one parameter; None for a model that ties nothing.
    """
    state = _wrappers.ModelState(model)
    head = getattr(state, "lm_head_param_name", None)
    if not state.uses_tied_lm_head or not isinstance(head, str):
        return None
    if not getattr(state, "has_local_tied_lm_head", False):
        return head, None
    return head, _embedding_name(model, head)


def _embedding_name(model: nn.Module, head: str) -> str | None:
    embeddings = getattr(_unwrap_ddp(model), "get_input_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    names = (_strip(name) for name, p in model.named_parameters(remove_duplicate=False) if p is weight)
    return next((name for name in names if name != head), None)


def require_optimizer_path(path: str) -> None:
    """Refuse an adapter's optimizer path that release 0.5 would take for a model path.

    Raises:
        ConfigError: If the installed release looks for `/model` anywhere in the path.
    """
    if not hasattr(_checkpointing, "_is_model_checkpoint_path") and "/model" in path:
        raise ConfigError(
            f"{path}: this nemo_automodel takes every path with '/model' in it for model weights, and would write "
            "the optimizer of an adapter as an adapter; use a path without '/model' or release 0.6 or later"
        )


def resolve_base_model(model_name: str, cache_dir: str | None) -> tuple[str, str]:
    """Find the directory of a base model.

    Args:
        model_name: A local directory, or a Hugging Face repository id that is in the cache.
        cache_dir: The hub cache; None for the default one.

    Returns:
        `(directory of the weights, cache directory)`.

    Raises:
        CheckpointNotFoundError: If neither is there; nothing is downloaded.
    """
    cache = cache_dir or HF_HUB_CACHE
    if os.path.exists(model_name):
        return model_name, cache
    found = _checkpointing._get_hf_safetensors_reference_path(cache, model_name)  # noqa: SLF001  no public name
    if found is None:
        raise CheckpointNotFoundError(
            f"base model {model_name!r} is neither a directory nor in the hub cache {cache}; "
            "download it first, or pass hf_cache_dir"
        )
    return found, cache


def _unwrap_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _strip(name: str) -> str:
    from ckpt_core.key_mapping import strip_wrapper_prefixes

    return strip_wrapper_prefixes(name)


def uses_names(keys: Sequence[str], names: Mapping[str, object]) -> bool:
    """Whether every key is one of `names`."""
    return all(key in names for key in keys)
