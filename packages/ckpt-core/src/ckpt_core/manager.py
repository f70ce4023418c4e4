"""Save and load DTensor models through nemo_automodel, exactly or not at all.

`AutomodelCheckpointManager` has the interface of the class of that name in NeMo RL. What it
adds is policy: a load is checked against the files' metadata before a parameter changes, a
save is staged and published whole, and all ranks end with the same result or the same error.
How this is done lies in the modules that it calls; what differs between nemo_automodel
releases lies in `automodel_compat`.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_core import automodel_compat as compat
from ckpt_core.automodel_compat import Checkpointer, CheckpointingConfig
from ckpt_core.base_model import load_base_model
from ckpt_core.collective import Step, agree
from ckpt_core.errors import ConfigError, SaveError
from ckpt_core.layout import _infer_checkpoint_root, detect_checkpoint_format
from ckpt_core.staged_save import StagedSave, part_directory
from ckpt_core.stored_checkpoint import StoredCheckpoint
from ckpt_core.training_objects import TrainingObjects, WritePaths

__all__ = ["AutomodelCheckpointManager", "Checkpointer", "_infer_checkpoint_root", "detect_checkpoint_format"]

_log = logging.getLogger(__name__)

_SAVE_OPTIONS = (
    "model_save_format",
    "save_consolidated",
    "is_peft",
    "peft_config",
    "model_cache_dir",
    "model_repo_id",
    "is_async",
    "dequantize_base_checkpoint",
)
"""Keys of `checkpointing_cfg` that are used; others belong to the training loop."""

_REMEMBERED = ("model_save_format", "save_consolidated")
"""What a save that does not mention it takes from `init_checkpointer` or `update_checkpointer_config`."""


class AutomodelCheckpointManager:
    """Manages the checkpoints of a model that is sharded over device meshes.

    Attributes:
        checkpointer: nemo_automodel's Checkpointer; None until `init_checkpointer`.
        checkpoint_config: The configuration that it was created with; updates act on it.
        model_state_dict_keys: Keys that a checkpoint must have, in native or stored names;
            None accepts those that the model has.
    """

    def __init__(
        self,
        dp_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        model_state_dict_keys: list[str] | None = None,
        moe_mesh: DeviceMesh | None = None,
    ) -> None:
        """Remember the meshes; nothing is created yet.

        Args:
            dp_mesh: Data parallel mesh.
            tp_mesh: Tensor parallel mesh.
            model_state_dict_keys: Keys to validate saves and loads against.
            moe_mesh: Mesh that experts are sharded over.
        """
        self.checkpointer: Any = None
        self.checkpoint_config: Any = None
        self.model_state_dict_keys = model_state_dict_keys
        self.dp_mesh = dp_mesh
        self.tp_mesh = tp_mesh
        self.moe_mesh = moe_mesh
        self._unpublished: StagedSave | None = None
        self._configured: dict[str, Any] = {}

    def _get_dp_rank(self) -> int:
        """Rank of this process in the data parallel group."""
        return torch.distributed.get_rank(self.dp_mesh.get_group())

    def _get_tp_rank(self) -> int:
        """Rank of this process in the tensor parallel group."""
        return torch.distributed.get_rank(self.tp_mesh.get_group())

    def init_checkpointer(
        self, config_updates: dict[str, Any] | None = None, checkpoint_root: str | None = None
    ) -> None:
        """Create the Checkpointer, if there is none yet.

        Args:
            config_updates: Fields of nemo_automodel's `CheckpointingConfig`.
            checkpoint_root: Directory of the run's checkpoints.

        Raises:
            ConfigError: If a field is unknown or its value impossible.
        """
        if self.checkpointer is not None:
            return
        given = {"checkpoint_dir": checkpoint_root or "", "model_state_dict_keys": self.model_state_dict_keys}
        updates = compat.normalize_options(given | (config_updates or {}))
        _require_accelerator(updates)
        self.checkpoint_config = compat.make_config(**updates)
        self._configured = {name: getattr(self.checkpoint_config, name) for name in _REMEMBERED}
        self.checkpointer = self._create_checkpointer(self.checkpoint_config)

    def _create_checkpointer(self, config: CheckpointingConfig) -> Checkpointer:
        dp_rank, tp_rank = self._get_dp_rank(), self._get_tp_rank()
        return Checkpointer(config=config, dp_rank=dp_rank, tp_rank=tp_rank, pp_rank=0, moe_mesh=self.moe_mesh)

    def update_checkpointer_config(
        self, config_updates: dict[str, Any] | None = None, checkpoint_root: str | None = None
    ) -> None:
        """Set fields on the configuration of the existing Checkpointer, if there is one.

        Args:
            config_updates: Fields of nemo_automodel's `CheckpointingConfig`.
            checkpoint_root: Directory of the run's checkpoints.

        Raises:
            ConfigError: If a field is unknown or its value impossible; nothing is set then.
        """
        if self.checkpointer is None:
            return
        updates = config_updates or {}
        self._update(updates, checkpoint_root)
        self._configured |= {name: getattr(self.checkpointer.config, name) for name in _REMEMBERED if name in updates}

    def _update(self, options: Mapping[str, Any], checkpoint_root: str | None) -> None:
        """Set fields for one call; later saves still start from what was configured."""
        updates = compat.normalize_options(options)
        _require_accelerator(updates)
        config = self.checkpointer.config
        was_async = config.is_async
        if checkpoint_root is not None:
            config.checkpoint_dir = checkpoint_root
        for name, value in updates.items():
            setattr(config, name, value)
        if self.model_state_dict_keys is not None:
            config.model_state_dict_keys = self.model_state_dict_keys
        if compat.is_real(self.checkpointer) and compat.needs_new_checkpointer(self.checkpointer, was_async=was_async):
            closing = Step(f"{config.checkpoint_dir}: the Checkpointer cannot be replaced", SaveError)
            agree(closing, self.checkpointer.close)
            self.checkpointer = self._create_checkpointer(config)
        self._rebuild_checkpointer_addons()

    def _rebuild_checkpointer_addons(self) -> None:
        """Make the Checkpointer's add-ons fit its current configuration."""
        if self.checkpointer is not None:
            self.checkpointer._addons = compat.make_addons(self.checkpointer.config)  # noqa: SLF001  no public name

    def set_model_state_dict_keys(self, keys: list[str]) -> None:
        """Set the keys that saves and loads are validated against.

        Args:
            keys: Native or stored names; wrapper prefixes are allowed.
        """
        self.model_state_dict_keys = keys
        if self.checkpointer is not None:
            self.checkpointer.config.model_state_dict_keys = keys

    def load_base_model(
        self,
        model: nn.Module,
        model_name: str,
        hf_cache_dir: str | None = None,
        dequantize_base_checkpoint: bool = False,  # noqa: FBT001, FBT002  the reference's signature
        peft_init_method: str | None = None,
    ) -> None:
        """Load the weights that training starts from into a parallelized model.

        Parameters on the meta device are materialized and initialized first.

        Args:
            model: Model to load into, sharded or not, on any device or on meta.
            model_name: A local directory, or a repository id that is in the hub cache.
            hf_cache_dir: The hub cache; None for the default one.
            dequantize_base_checkpoint: Whether quantized weights are dequantized.
            peft_init_method: How to initialize adapters, such as "xavier".

        Raises:
            AssertionError: If the Checkpointer has not been initialized.
            CheckpointNotFoundError: If the base model is not on this machine.
            KeyMismatchError: If it lacks parameters of the model; nothing was changed.
            LoadError: If loading failed or left parameters without values.
            SaveError: If an earlier asynchronous save failed; nothing was loaded.
        """
        self._require_checkpointer("loading base model")
        self.close()
        self._update({"model_repo_id": model_name, "dequantize_base_checkpoint": dequantize_base_checkpoint}, None)
        self.checkpointer.config.model_state_dict_keys = self.model_state_dict_keys
        load_base_model(self.checkpointer, model, model_name, hf_cache_dir, peft_init_method)

    def save_checkpoint(  # noqa: PLR0913, PLR0917  the reference's signature
        self,
        model: nn.Module,
        weights_path: str,
        optimizer: torch.optim.Optimizer | None = None,
        optimizer_path: str | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        tokenizer: Any = None,  # noqa: ANN401  a tokenizer or processor of transformers
        tokenizer_path: str | None = None,
        checkpointing_cfg: Mapping[str, Any] | None = None,
        lora_enabled: bool = False,  # noqa: FBT001, FBT002
        peft_config: Any = None,  # noqa: ANN401  nemo_automodel is not typed
    ) -> None:
        """Save a checkpoint; what stood at its place before stays until this one is complete.

        The weights go to `weights_path/model` (or to `weights_path` if it ends in `model`),
        the optimizer and scheduler to `optimizer_path/optim`.

        Args:
            model: Model to save.
            weights_path: Directory for the weights.
            optimizer: Saved if `optimizer_path` is given as well.
            optimizer_path: Directory for the optimizer; may equal `weights_path`.
            scheduler: Saved with the optimizer.
            tokenizer: Saved to `tokenizer_path` or, without one, beside the weights, where
                only safetensors and adapters have a place for it.
            tokenizer_path: Directory for the tokenizer.
            checkpointing_cfg: `model_save_format`, `save_consolidated`, `is_peft`,
                `peft_config`, `model_cache_dir`, `model_repo_id`, `is_async` and
                `dequantize_base_checkpoint` are used, other keys are not.
            lora_enabled: Save only the adapter, described by `peft_config`.
            peft_config: nemo_automodel's PeftConfig.

        Raises:
            AssertionError: If the Checkpointer has not been initialized.
            ValueError: If there is no `checkpointing_cfg`, or an impossible one.
            KeyMismatchError: If the model's keys are not `model_state_dict_keys`.
            SaveError: If this save failed, on every rank, with nothing replaced unless the
                message says so; or if an earlier asynchronous one did.
        """
        self._require_checkpointer("saving checkpoint")
        if checkpointing_cfg is None:
            raise ValueError("checkpointing_cfg must be provided when saving checkpoint")
        _log.info("Saving checkpoint to %s", weights_path)
        self.close()
        options = {name: checkpointing_cfg[name] for name in _SAVE_OPTIONS if name in checkpointing_cfg}
        adapter = options.pop("peft_config", None)
        if lora_enabled:
            options["is_peft"], adapter = True, peft_config
        # An earlier save or load must not decide how this one is written.
        options = {"is_peft": False, "is_async": False} | self._configured | options
        self._update(options, _infer_checkpoint_root(weights_path))
        state = TrainingObjects(model, optimizer if optimizer_path else None, scheduler, tokenizer, adapter)
        paths = WritePaths(weights_path, optimizer_path if optimizer is not None else None, tokenizer_path)
        if compat.is_real(self.checkpointer):
            self._save_staged(state, paths)
        else:
            state.write(self.checkpointer, paths)

    def _save_staged(self, state: TrainingObjects, paths: WritePaths) -> None:
        reason = compat.explain_no_consolidation(self.checkpointer.config)
        if reason is not None:
            _log.warning("%s will not be consolidated: %s", paths.model, reason)
        if state.tokenizer is not None and paths.tokenizer is None and not self.checkpointer._addons:  # noqa: SLF001
            _log.warning(
                "%s: the tokenizer is not saved, torch_save has no place for it; pass tokenizer_path", paths.model
            )
        save = StagedSave(self.checkpointer, state, self.model_state_dict_keys)
        save.start(paths)
        if not self.checkpointer.config.is_async:
            save.publish()
            return
        self._unpublished = save
        atexit.register(self._close_at_exit)

    def load_checkpoint(
        self,
        model: nn.Module,
        weights_path: str,
        optimizer: torch.optim.Optimizer | None = None,
        optimizer_path: str | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        """Load a checkpoint, of any mesh, into a model and perhaps its optimizer.

        Everything is checked first, from metadata: files, chunk coverage, names, shapes,
        dtypes, and that model and optimizer are of one save. A wider dtype in the model is
        filled exactly; a narrower one is refused.

        Args:
            model: Model to load into.
            weights_path: Directory that was given to the save, or its `model` directory.
            optimizer: Loaded if `optimizer_path` is given as well.
            optimizer_path: Directory that was given to the save.
            scheduler: Loaded with the optimizer.

        Raises:
            AssertionError: If the Checkpointer has not been initialized.
            CheckpointNotFoundError: If there is no checkpoint.
            CorruptCheckpointError: If it is not whole.
            KeyMismatchError: If it is not one of this model; nothing was changed.
            UnsafePickleError: If loading it would run code; nothing was executed or changed.
            LoadError: If reading failed after the checks; the message says what was changed.
            SaveError: If an earlier asynchronous save failed; nothing was loaded.
        """
        self._require_checkpointer("loading checkpoint")
        _log.info("Loading checkpoint from %s", weights_path)
        self.close()
        state = TrainingObjects(model, optimizer if optimizer_path else None, scheduler)
        model_dir = part_directory(weights_path, "model")
        optim_dir = part_directory(optimizer_path, "optim") if optimizer_path and optimizer is not None else None
        stored = StoredCheckpoint.read(model_dir, optim_dir) if compat.is_real(self.checkpointer) else None
        save_format, is_peft = stored.save_format if stored else detect_checkpoint_format(weights_path)
        self._update(
            # What a manager wrote is dequantized already.
            {"model_save_format": save_format, "is_peft": is_peft, "dequantize_base_checkpoint": False},
            _infer_checkpoint_root(weights_path),
        )
        if stored:
            stored.require_fit(self.checkpointer, state, self.model_state_dict_keys)
        state.read(self.checkpointer, model_dir, optim_dir)
        if stored:
            stored.require_unchanged()

    def close(self) -> None:
        """Publish an asynchronous save that is not published yet; collective.

        Every save and load does this first, and so does the end of the process, unless an
        exception ends it. Call it before `destroy_process_group`, so that ranks can still
        tell each other what went wrong.

        Raises:
            SaveError: If writing failed; what stood there before is untouched.
        """
        save, self._unpublished = self._unpublished, None
        if save is not None:
            atexit.unregister(self._close_at_exit)
            save.publish()

    def _close_at_exit(self) -> None:
        if getattr(sys, "last_type", None) is not None:
            # The other ranks may be anywhere; meeting them in a collective would hold this process up.
            _log.warning("an asynchronous save is not published, because an exception ends the process")
            return
        self.close()

    def _require_checkpointer(self, purpose: str) -> None:
        if self.checkpointer is None:
            raise AssertionError(f"Checkpointer must be initialized before {purpose}. Call init_checkpointer() first.")


def _require_accelerator(updates: Mapping[str, object]) -> None:
    if updates.get("is_async") and not compat.has_accelerator():
        raise ConfigError(
            "is_async=True needs an accelerator to copy the state from, and there is none; save with is_async=False"
        )
