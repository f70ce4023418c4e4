"""Canonical names of tensors: without what wrappers and nesting added to them.

Three things put something in front of a parameter's own name:

- wrappers that are modules: `torch.compile` (`_orig_mod`), FSDP1 (`_fsdp_wrapped_module`) and
  activation checkpointing (`_checkpoint_wrapped_module`) insert a component anywhere;
  DistributedDataParallel puts `module` in front of everything;
- nesting: a state dict saved as `{"model": state}` is flattened, so that its names begin with
  `model.` though no module is called that. DCP records the path of each entry, which tells
  such a key from a module of the same name.

Names are mapped, never merged: two stored names that come to the same canonical one are
reported, and keep their stored names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_core.errors import Problem

Nesting = tuple[str | int, ...]

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP_PREFIX = "module."
_MODEL_KEYS = frozenset({"model", "model_state_dict", "state_dict"})
_OPTIMIZER_KEYS = frozenset({"optim", "optimizer", "optimizers"})
# torch.nn.Module.get_extra_state's key: what a module keeps beside its parameters, in a form of its own.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class CanonicalNames:
    """Stored names and what they become."""

    names: Mapping[str, str]
    """Stored FQN -> canonical FQN; one to one."""
    nest: Nesting
    """Path in the saved state dict under which the model lies; `()` if at the top."""
    outside: tuple[str, ...]
    """Stored FQNs that lie elsewhere in the state dict: optimizer state, counters."""
    problems: tuple[Problem, ...]
    """Names that would become equal."""


def strip_wrapper_prefixes(name: str) -> str:
    """Take the components off that wrappers insert.

    >>> strip_wrapper_prefixes("module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    *modules, parameter = name.split(".")
    stripped = ".".join([*(part for part in modules if part not in _WRAPPERS), parameter])
    while stripped.startswith(_DDP_PREFIX) and stripped != _DDP_PREFIX:
        stripped = stripped.removeprefix(_DDP_PREFIX)
    return stripped


def is_extra_state(fqn: str) -> bool:
    """Whether a name is that of a module's extra state, which is no weight.

    A module may return a dict; DCP flattens it into names below that of the state.

    >>> is_extra_state("attn._extra_state.amax"), is_extra_state("extra_state.weight")
    (True, False)
    """
    return _EXTRA_STATE in fqn.split(".")


def find_canonical_names(fqns: Iterable[str], nesting: Mapping[str, Nesting]) -> CanonicalNames:
    """Find the canonical name of every tensor.

    Args:
        fqns: Stored names of the tensors.
        nesting: Path of each name in the nested state dict, as far as it is known.

    >>> found = find_canonical_names(["model.w"], {"model.w": ("model", "w")})
    >>> found.names["model.w"], found.nest
    ('w', ('model',))
    """
    stored = list(fqns)
    nest = _find_nest([nesting[fqn] for fqn in stored if fqn in nesting])
    outside = tuple(fqn for fqn in stored if _is_outside(nesting.get(fqn), nest))
    skipped = frozenset(outside)
    names = {fqn: fqn if fqn in skipped else _unwrap(fqn, nesting.get(fqn), nest) for fqn in stored}
    problems = _separate_equal_names(names)
    return CanonicalNames(MappingProxyType(names), nest, outside, tuple(problems))


def _find_nest(paths: list[Nesting]) -> Nesting:
    """Find the one path that ends in a key under which trainers keep the model."""
    candidates = [path for path in paths if not _OPTIMIZER_KEYS.intersection(path[:-1])]
    nests = {path[: place + 1] for path in candidates if (place := _find_model_key(path)) is not None}
    return next(iter(nests)) if len(nests) == 1 else ()


def _find_model_key(path: Nesting) -> int | None:
    return next((place for place, key in enumerate(path[:-1]) if key in _MODEL_KEYS), None)


def _is_outside(path: Nesting | None, nest: Nesting) -> bool:
    if path is None:
        return False
    return path[: len(nest)] != nest or bool(_OPTIMIZER_KEYS.intersection(path[:-1]))


def _unwrap(fqn: str, path: Nesting | None, nest: Nesting) -> str:
    inner = fqn if path is None or not nest else ".".join(map(str, path[len(nest) :]))
    return strip_wrapper_prefixes(inner)


def _separate_equal_names(names: dict[str, str]) -> list[Problem]:
    """Give names that became equal their stored form back; report them."""
    stored: dict[str, list[str]] = defaultdict(list)
    for fqn, canonical in names.items():
        stored[canonical].append(fqn)
    problems = []
    for canonical, fqns in stored.items():
        if len(fqns) > 1:
            names.update((fqn, fqn) for fqn in fqns)
            message = f"stored as {', '.join(map(repr, fqns))}, which differ in wrapper prefixes or nesting only"
            problems.append(Problem("duplicate_tensor", canonical, message))
    return problems
