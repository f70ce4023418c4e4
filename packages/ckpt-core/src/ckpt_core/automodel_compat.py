"""Everything that differs between nemo_automodel releases, or is private in them.

Releases 0.5 to 0.7 moved `_should_write_hf_metadata` from a method to a function, added
arguments to the state wrappers, and left several things that a manager needs without a
public name. They are resolved here, once; `manager` states policy in these terms only.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from nemo_automodel.components.checkpoint import checkpointing as _checkpointing
from nemo_automodel.components.checkpoint import stateful_wrappers as _wrappers
from nemo_automodel.components.checkpoint._backports.filesystem import SerializationFormat
from nemo_automodel.components.checkpoint.addons import ConsolidatedHFAddon, PeftAddon
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.checkpoint.config import SaveConsolidatedMode
from torch import nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckpt_core.errors import CheckpointNotFoundError, ConfigError, LayoutError
from ckpt_core.key_mapping import strip_wrapper_prefixes

__all__ = [
    "HF_HUB_CACHE",
    "Checkpointer",
    "CheckpointingConfig",
    "clear_plan_caches",
    "explain_no_consolidation",
    "find_tied_head",
    "has_accelerator",
    "has_lora",
    "is_peft_config",
    "is_real",
    "make_addons",
    "make_config",
    "model_device",
    "model_state_dict",
    "native_names",
    "needs_new_checkpointer",
    "normalize_options",
    "optimizer_state_dict",
    "renames_base",
    "require_optimizer_path",
    "resolve_base_model",
    "stored_namings",
    "transient_buffers",
    "written_directories",
]

_ADAPTER_OPTIONS = ("v4_compatible", "legacy_paramwrapper_layout")


def is_real(checkpointer: object) -> bool:
    """Whether `checkpointer` is nemo_automodel's, and not a double that writes nothing."""
    return isinstance(checkpointer, Checkpointer)


def call_supported(function: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401  the callee's types
    """Call `function` with those of `options` that this release's signature names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return function(*args, **{name: value for name, value in options.items() if takes_all or name in parameters})


def make_config(**options: object) -> CheckpointingConfig:
    """Create a configuration with the manager's defaults.

    Args:
        options: Fields, in the form that `normalize_options` gives them.

    Raises:
        ConfigError: If the constructor refuses them.
    """
    defaults = {"model_save_format": "safetensors", "save_consolidated": False, "dequantize_base_checkpoint": False}
    options = defaults | options
    if isinstance(options["model_save_format"], SerializationFormat):
        # The constructor takes the string only.
        options["model_save_format"] = options["model_save_format"].value
    try:
        return CheckpointingConfig(**options)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"checkpointing options {sorted(options)} are impossible: {error}") from error


def normalize_options(options: Mapping[str, object]) -> dict[str, object]:
    """Bring configuration values into the form that `CheckpointingConfig` stores.

    Setting a field on an existing configuration skips `__post_init__`, and a plain `True`
    for `save_consolidated` then matches none of the enum's members: nothing is consolidated.

    Raises:
        ConfigError: If this release knows no such field, or not this value.
    """
    return {name: _normalize_option(name, value) for name, value in options.items()}


def _normalize_option(name: str, value: object) -> object:
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


def explain_no_consolidation(config: CheckpointingConfig) -> str | None:
    """Say why a save will not consolidate although it was asked to; None if it will, or was not."""
    if config.save_consolidated == SaveConsolidatedMode.FALSE or config.is_peft:
        return None
    if config.model_save_format != SerializationFormat.SAFETENSORS:
        return "the format is torch_save; convert the checkpoint with ckpt-convert"
    if config.save_consolidated == SaveConsolidatedMode.FINAL:
        return "nothing here says which save is the final one; use save_consolidated=True"
    return None


def needs_new_checkpointer(checkpointer: Any, *, was_async: bool) -> bool:  # noqa: ANN401
    """Whether a changed configuration needs what only the constructor makes.

    That is stagers and process groups of asynchronous saves, and the group in which a
    background thread consolidates: on the default group it would meet the training's own
    collectives.
    """
    config = checkpointer.config
    if config.is_async != was_async:
        return True
    consolidates = config.is_async and "model/consolidated" in written_directories(config)
    lacks_group = getattr(checkpointer, "_consolidation_process_group", checkpointer) is None
    return consolidates and lacks_group and torch.distributed.is_initialized()


def make_addons(config: CheckpointingConfig) -> list[object]:
    """Build the list that `Checkpointer.__init__` would build for `config`."""
    writes_hf = config.model_save_format == SerializationFormat.SAFETENSORS and not config.is_peft
    addons: list[object] = [ConsolidatedHFAddon()] if writes_hf else []
    return [*addons, PeftAddon()] if config.is_peft else addons


def written_directories(config: CheckpointingConfig) -> list[str]:
    """Directories that the library makes on one rank while the others wait in a barrier."""
    writes_hf = any(isinstance(addon, ConsolidatedHFAddon) for addon in make_addons(config))
    consolidates = writes_hf and config.save_consolidated == SaveConsolidatedMode.EVERY
    return ["model", *(["model/.hf_metadata"] if writes_hf else []), *(["model/consolidated"] if consolidates else [])]


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


def is_peft_config(value: object) -> bool:
    """Whether `value` has what the library reads of its own `PeftConfig`, which peft's LoraConfig has not."""
    return all(hasattr(value, name) for name in ("dim", "alpha", "to_dict"))


def has_lora(model: nn.Module) -> bool:
    """Whether any trainable parameter belongs to an adapter."""
    return any("lora_" in name and parameter.requires_grad for name, parameter in model.named_parameters())


def model_device(model: nn.Module) -> torch.device:
    """Where the parameters are or, while they are on meta, where they should go."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def model_state_dict(model: nn.Module, *, is_peft: bool, moe: bool) -> Any:  # noqa: ANN401
    """The state dict under native names, as the Checkpointer would start from.

    With PEFT this is a collective; the tensors are then on rank 0 only.
    """
    state = call_supported(_wrappers.ModelState, model, is_peft=is_peft, has_expert_parallelism=moe)
    return state.state_dict()


def stored_namings(model: nn.Module, held: Any, config: Any, moe_mesh: Any) -> list[Any]:  # noqa: ANN401
    """Name a native state dict as it is stored, and then as the library can also read it.

    Classes with an adapter store experts one by one, and adapters of experts in more than
    one way; which one is told by the configuration on a save, and by the files on a load.
    """
    adapter = getattr(_unwrap_ddp(model), "state_dict_adapter", None)
    if not adapter:
        return [_drop_extra_state(held, config)]
    options = {name: getattr(config, name) for name in _ADAPTER_OPTIONS if hasattr(config, name)}
    variants = [options]
    if config.is_peft and "v4_compatible" in options:
        variants.append(options | {"v4_compatible": not options["v4_compatible"]})
    return [_drop_extra_state(_adapt(adapter, dict(held), moe_mesh, variant), config) for variant in variants]


def _adapt(adapter: Any, held: Any, moe_mesh: Any, options: Mapping[str, object]) -> Any:  # noqa: ANN401
    return adapter.to_hf(
        held, exclude_key_regex=r".*_extra_state.*", quantization=False, device_mesh=moe_mesh, **options
    )


def _drop_extra_state(state_dict: Any, config: Any) -> Any:  # noqa: ANN401
    # Safetensors hold no module metadata; the Checkpointer leaves it out of them.
    if config.model_save_format != SerializationFormat.SAFETENSORS:
        return state_dict
    return {name: value for name, value in state_dict.items() if not name.endswith("_extra_state")}


def native_names(model: nn.Module) -> frozenset[str]:
    """Names of `model.state_dict()` without the prefixes of wrappers."""
    return frozenset(get_model_state_dict(model))


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
    names = (strip_wrapper_prefixes(name) for name, p in model.named_parameters(remove_duplicate=False) if p is weight)
    return next((name for name in names if name != head), None)


def transient_buffers(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that no state dict holds."""
    names = (
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001  torch has no public name for it
    )
    return frozenset(strip_wrapper_prefixes(name) for name in names)


def require_optimizer_path(path: str, *, is_peft: bool) -> None:
    """Refuse an adapter's optimizer path that release 0.5 would take for a model path.

    Raises:
        ConfigError: If the installed release looks for `/model` anywhere in the path.
    """
    if is_peft and "/model" in path and not hasattr(_checkpointing, "_is_model_checkpoint_path"):
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
        LayoutError: If the cache holds several snapshots and does not say which is current.
    """
    cache = cache_dir or HF_HUB_CACHE
    if Path(model_name).exists():
        return model_name, cache
    repository = Path(cache, f"models--{model_name.replace('/', '--')}")
    snapshots = sorted(path for path in repository.glob("snapshots/*") if path.is_dir())
    main = repository / "refs" / "main"
    if main.is_file():
        snapshots = [path for path in snapshots if path.name == main.read_text().strip()]
    if len(snapshots) == 1:
        return str(snapshots[0]), cache
    if snapshots:
        raise LayoutError(
            f"{repository}: holds {len(snapshots)} snapshots and no refs/main that says which; pass one as model_name: "
            f"{[str(path) for path in snapshots]}"
        )
    raise CheckpointNotFoundError(
        f"base model {model_name!r} is neither a directory nor in the hub cache {cache}; "
        "download it first, or pass hf_cache_dir"
    )


def renames_base(model: nn.Module) -> bool:
    """Whether a base model's names or tensors are converted on the way into `model`."""
    inner = _unwrap_ddp(model)
    if getattr(inner, "state_dict_adapter", None):
        return True
    model_type = getattr(getattr(inner, "config", None), "model_type", None)
    if not model_type:
        return False
    own = getattr(inner, "_checkpoint_conversion_mapping", None)
    mapping = call_supported(_checkpointing.get_combined_key_mapping, model_type, own, model=inner)
    return bool(mapping) or _checkpointing.requires_tensor_merging(model_type)


def base_names(model: nn.Module, config: Any) -> frozenset[str]:  # noqa: ANN401
    """Names that loading a base model asks for: no adapter, no task heads that are skipped."""
    state = _wrappers.ModelState(
        model,
        is_peft=config.is_peft,
        is_init_step=True,
        skip_task_head_prefixes=getattr(config, "skip_task_head_prefixes_for_base_model", None),
    )
    return frozenset(state.state_dict())


def base_prefix(model: nn.Module) -> str:
    """What stands before a base model's names in a model with a head; empty if nothing does."""
    prefix = getattr(_unwrap_ddp(model), "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def _unwrap_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
