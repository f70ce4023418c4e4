"""Do the names, shapes and dtypes of a checkpoint fit a model? Rules, without I/O.

What may differ without an error is written down here and nowhere else:

- The head of a model with tied embeddings may be stored or not (`TiedHead`).
- `_extra_state` belongs to modules, not to weights; either side may lack it.
- Buffers that are not persistent are in no state dict, so a list of keys may name them.
- With an adapter only `lora_` names are stored, so a list of keys may name the base model.
- Of an optimizer's `param_groups`, options that the optimizer does not know stay unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_core.dtypes import holds_every_value
from ckpt_core.errors import Problem
from ckpt_core.key_mapping import is_extra_state, strip_wrapper_prefixes

GROUPS_PREFIX = "optim.param_groups."
"""Options of an optimizer are stored once for each parameter: `optim.param_groups.<fqn>.<option>`."""

_ADAPTER_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Entry:
    """Dtype and global shape of a tensor; on both sides of a comparison."""

    dtype: str
    """A safetensors dtype string."""
    shape: tuple[int, ...]
    """Global shape, in elements."""

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class NamedState:
    """Tensors and objects by stored name, of a model or of a checkpoint."""

    tensors: Mapping[str, Entry]
    objects: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Every name, tensors and objects."""
        return self.objects | self.tensors.keys()


@dataclass(frozen=True, slots=True)
class TiedHead:
    """An output head that the configuration ties to the input embedding."""

    head: str
    embedding: str | None
    """Set while both are one parameter in memory."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What is known of the model beyond its names."""

    tied: TiedHead | None = None
    transient: frozenset[str] = frozenset()
    """Names of buffers that are not persistent."""
    is_peft: bool = False


def compare_states(expected: NamedState, stored: NamedState, rules: KeyRules) -> list[Problem]:
    """List what of `stored` cannot be loaded exactly into `expected`."""
    missing = [name for name in expected.names - stored.names if not _may_miss(name, stored, rules)]
    unexpected = [name for name in stored.names - expected.names if not _may_be_extra(name, rules)]
    return _list_names(missing, unexpected) + _compare_common(expected, stored)


def compare_optimizers(expected: NamedState, stored: NamedState) -> list[Problem]:
    """List what of a stored optimizer and scheduler does not fit the live ones.

    A scheduler that is stored but not asked for is left alone, as are options of parameter
    groups that the live optimizer does not have.
    """
    missing = expected.names - stored.names
    unexpected = [name for name in stored.names - expected.names if name.startswith("optim.state.")]
    return _list_names(missing, unexpected) + _compare_common(expected, stored)


def compare_groups(groups: Iterable[Sequence[str]], stored: Mapping[str, object]) -> list[Problem]:
    """List options that cannot be loaded, because a live group would need two values of them.

    Args:
        groups: Names of the parameters of each live group.
        stored: Option values by stored name.
    """
    values: dict[str, dict[str, object]] = {}
    for name, value in stored.items():
        fqn, _, option = name.removeprefix(GROUPS_PREFIX).rpartition(".")
        values.setdefault(fqn, {})[option] = value
    problems = []
    for first, *others in groups:
        for option, value in values.get(first, {}).items():
            other = next((fqn for fqn in others if values.get(fqn, {}).get(option, value) != value), None)
            if other is not None:
                message = (
                    f"stored {values[other][option]!r}, but {value!r} for {first!r}, which is in the same group now"
                )
                problems.append(Problem("value", f"{GROUPS_PREFIX}{other}.{option}", message))
    return problems


def compare_requested(
    requested: Iterable[str],
    native: frozenset[str],
    stored: frozenset[str],
    rules: KeyRules,
) -> list[Problem]:
    """List how requested keys differ from a model's, or from a checkpoint's.

    Args:
        requested: Keys in native or in stored names, wrapper prefixes allowed.
        native: Names that the model uses in memory.
        stored: Names that are, or would be, on disk.
        rules: What may differ.
    """
    asked = frozenset(strip_wrapper_prefixes(name) for name in requested)
    if rules.is_peft:
        return _compare_adapter_keys(asked, stored)
    candidates = [_requested_problems(asked, side, rules) for side in (stored, native)]
    # Keys taken before the model was adapted name what is in memory, others what is on disk.
    return min(candidates, key=len)


def _requested_problems(asked: frozenset[str], side: frozenset[str], rules: KeyRules) -> list[Problem]:
    optional = rules.transient | ({rules.tied.head} if rules.tied else frozenset())
    missing = {name for name in asked - side - optional if not is_extra_state(name)}
    unexpected = {name for name in side - asked - optional if not is_extra_state(name)}
    return _list_names(missing, unexpected)


def _compare_adapter_keys(asked: frozenset[str], stored: frozenset[str]) -> list[Problem]:
    wanted = {name.removeprefix(_ADAPTER_PREFIX) for name in asked if "lora_" in name}
    found = {strip_wrapper_prefixes(name.removeprefix(_ADAPTER_PREFIX)) for name in stored}
    return _list_names(wanted - found, found - wanted) if wanted else []


def _may_miss(name: str, stored: NamedState, rules: KeyRules) -> bool:
    if is_extra_state(name):
        return True
    # The library fills a head that is tied by configuration from the stored embedding.
    return rules.tied is not None and name == rules.tied.head and bool(stored.tensors)


def _may_be_extra(name: str, rules: KeyRules) -> bool:
    # Whether a stored head equals the embedding is for the caller to see: it takes bytes.
    return is_extra_state(name) or (
        rules.tied is not None and rules.tied.embedding is not None and name == rules.tied.head
    )


def _list_names(missing: Iterable[str], unexpected: Iterable[str]) -> list[Problem]:
    return [
        *(Problem("missing_tensor", name, "expected, not stored") for name in sorted(missing)),
        *(Problem("unexpected_tensor", name, "stored, not expected") for name in sorted(unexpected)),
    ]


def _compare_common(expected: NamedState, stored: NamedState) -> list[Problem]:
    """Compare what both sides have: tensors with tensors, and objects with objects."""
    problems = []
    for name in sorted(expected.names & stored.names):
        a, b = expected.tensors.get(name), stored.tensors.get(name)
        if a is not None and b is not None:
            problems += _compare_entries(name, a, b)
        elif (a is None) != (b is None) and not is_extra_state(name):
            kinds = ["an object" if entry is None else f"a tensor {entry}" for entry in (a, b)]
            problems.append(Problem("dtype", name, f"expected {kinds[0]}, stored as {kinds[1]}"))
    return problems


def _compare_entries(name: str, expected: Entry, stored: Entry) -> list[Problem]:
    problems = []
    if expected.shape != stored.shape:
        problems.append(Problem("shape", name, f"expected {expected.shape}, stored {stored.shape}"))
    if not holds_every_value(expected.dtype, stored.dtype):
        problems.append(Problem("dtype", name, f"stored {stored.dtype} would lose values in {expected.dtype}"))
    return problems
