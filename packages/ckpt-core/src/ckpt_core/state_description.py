"""Describe a live model and its optimizer as a checkpoint would name them.

A rank sees its own part: with experts sharded over ranks it does not even have the names
of the others. So every rank describes what it holds, and the parts are merged on one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core import automodel_compat as compat
from ckpt_core.errors import ConfigError
from ckpt_core.key_check import KeyRules, TiedHead
from ckpt_core.key_mapping import strip_wrapper_prefixes
from ckpt_core.live_state import LiveState, describe_state, merge_states
from ckpt_core.training_objects import TrainingObjects


@dataclass(frozen=True, slots=True)
class StateDescription:
    """A model and optimizer, of one rank or of all."""

    namings: tuple[LiveState, ...]
    """The model under the names that are written, and under others that the library also reads."""
    native: frozenset[str]
    """The names that `model.state_dict()` has, wrapper prefixes taken off."""
    optimizer: LiveState | None
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters in each group of the optimizer; empty groups are left out."""
    rules: KeyRules

    @property
    def stored(self) -> LiveState:
        """The model under the names that are written."""
        return self.namings[0]


def describe_training(checkpointer: Any, state: TrainingObjects) -> StateDescription:  # noqa: ANN401
    """Describe this rank's part of what the Checkpointer would write or read.

    Collective with PEFT, where rank 0 gathers the adapter.

    Args:
        checkpointer: nemo_automodel's, with the configuration of this save or load.
        state: The live model, optimizer and scheduler.
    """
    config, moe_mesh = checkpointer.config, checkpointer.moe_mesh
    _require_storage(state)
    held = compat.model_state_dict(state.model, is_peft=config.is_peft, moe=moe_mesh is not None)
    namings = compat.stored_namings(state.model, held, config, moe_mesh)
    tied = compat.find_tied_head(state.model)
    return StateDescription(
        namings=tuple(describe_state(naming) for naming in namings),
        native=compat.native_names(state.model),
        optimizer=_describe_optimizer(state, is_peft=config.is_peft, moe=moe_mesh is not None),
        groups=_name_groups(state),
        rules=KeyRules(
            tied=None if tied is None else TiedHead(*tied),
            transient=compat.transient_buffers(state.model),
            is_peft=config.is_peft,
        ),
    )


def _require_storage(state: TrainingObjects) -> None:
    empty = [name for name, tensor in state.model.state_dict().items() if getattr(tensor, "is_meta", False)]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors of the model are on the meta device, such as {empty[0]!r}, and hold nothing that "
            "could be saved or loaded into; use load_base_model, or materialize them with to_empty"
        )


def merge_descriptions(parts: Sequence[StateDescription]) -> StateDescription:
    """Join the parts of all ranks."""
    optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    return StateDescription(
        namings=tuple(merge_states(naming) for naming in zip(*(part.namings for part in parts), strict=True)),
        native=frozenset().union(*(part.native for part in parts)),
        optimizer=merge_states(optimizers) if optimizers else None,
        groups=tuple(dict.fromkeys(group for part in parts for group in part.groups)),
        rules=_merge_rules([part.rules for part in parts]),
    )


def find_origin(parts: Sequence[StateDescription], names: Collection[str]) -> int | None:
    """Find the rank that alone has one of these names; None if they are not one rank's."""
    having = [
        {rank for rank, part in enumerate(parts) if name in part.stored.named.names or name in part.native}
        for name in names
    ]
    alone = {next(iter(ranks)) for ranks in having if len(ranks) == 1}
    return alone.pop() if len(alone) == 1 and len(parts) > 1 else None


def _describe_optimizer(state: TrainingObjects, *, is_peft: bool, moe: bool) -> LiveState | None:
    optimizer = state.optimizer
    if optimizer is None:
        return None
    held = {parameter: set(entries) for parameter, entries in optimizer.state.items()}
    try:
        return describe_state(
            compat.optimizer_state_dict(state.model, optimizer, state.scheduler, is_peft=is_peft, moe=moe)
        )
    finally:
        # Describing must not change anything: the library fills in what an optimizer has not got yet.
        for parameter in list(optimizer.state):
            for name in list(optimizer.state[parameter].keys() - held.get(parameter, set())):
                del optimizer.state[parameter][name]
            if parameter not in held:
                del optimizer.state[parameter]


def _name_groups(state: TrainingObjects) -> tuple[tuple[str, ...], ...]:
    if state.optimizer is None:
        return ()
    names = {parameter: strip_wrapper_prefixes(name) for name, parameter in state.model.named_parameters()}
    groups = ([names[p] for p in group["params"] if p in names] for group in state.optimizer.param_groups)
    return tuple(tuple(group) for group in groups if group)


def _merge_rules(rules: Sequence[KeyRules]) -> KeyRules:
    return KeyRules(
        tied=next((rule.tied for rule in rules if rule.tied is not None), None),
        transient=frozenset().union(*(rule.transient for rule in rules)),
        is_peft=any(rule.is_peft for rule in rules),
    )
