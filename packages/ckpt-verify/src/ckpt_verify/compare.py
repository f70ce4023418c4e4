"""Do two checkpoints, of any layouts, hold the same tensors?

    names:  stored FQNs, without nesting and wrapper prefixes; no optimizer entries, no extra states of modules
    specs:  missing, unexpected, shape, dtype; known without reading a tensor
    values: the row-major bytes of both sides, block by block, bit for bit

Memory is that of a few blocks, whatever the size of the tensors. A damaged checkpoint is
refused before any tensor is read, because equal damage is not equality. The expected values
are those of the other side, never the result of a conversion made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import CorruptCheckpointError, LayoutError, Problem, ProblemKind
from ckpt_core.key_mapping import find_canonical_names, is_extra_state
from ckpt_core.reader import CheckpointReader, open_checkpoint
from ckpt_core.spec import TensorSpec
from ckpt_core.stream import stream_tensor

from ckpt_verify.comparison import ComparedSide, Comparison, TiedPair, ValueProblem
from ckpt_verify.tied import denies_tying, find_twin
from ckpt_verify.value_diff import StreamLengthError, ValueDiff, find_value_diff, render_element

BLOCK_BYTES = 4 * 1024 * 1024
"""Read from each side at a time; long enough that a read costs more than the call."""


def compare_checkpoints(a: Path | str, b: Path | str) -> Comparison:
    """Compare every tensor of two checkpoints bit for bit, dtype- and shape-strict.

    Args:
        a: Path of the checkpoint that is taken as the expected one.
        b: Path of the one that is checked.

    Raises:
        CheckpointNotFoundError: There is nothing at a path.
        LayoutError: A path holds no layout that can be read, or no tensor of a model.
        CorruptCheckpointError: A checkpoint is damaged; `problems` lists everything that is wrong.
    """
    return _Comparer(_Side.open("A", a), _Side.open("B", b)).run()


@dataclass(frozen=True, slots=True)
class _Side:
    """One opened checkpoint that is fit to be compared."""

    label: str
    reader: CheckpointReader
    specs: Mapping[str, TensorSpec]
    """Tensors of the model by canonical name, in stored order."""
    outside: tuple[str, ...]
    extra_states: tuple[str, ...]
    warnings: tuple[Problem, ...]

    @classmethod
    def open(cls, label: str, path: Path | str) -> _Side:
        reader = open_checkpoint(path)
        found = reader.check()
        canonical = find_canonical_names(reader.tensors, reader.nesting)
        errors = [problem for problem in (*found, *canonical.problems) if problem.severity == "error"]
        if errors:
            raise CorruptCheckpointError(
                f"{reader.path}: is damaged or ambiguous, so nothing was compared; restore it or compare another copy",
                problems=errors,
            )
        outside = frozenset(canonical.outside)
        extra = tuple(fqn for fqn in reader.tensors if fqn not in outside and is_extra_state(fqn))
        skipped = outside.union(extra)
        specs = {canonical.names[fqn]: spec for fqn, spec in reader.tensors.items() if fqn not in skipped}
        if not specs:
            raise LayoutError(f"{reader.path}: holds no tensor of a model, so there is nothing to compare")
        return cls(label, reader, specs, canonical.outside, extra, tuple(found))

    def stream(self, spec: TensorSpec) -> Iterator[bytes | bytearray]:
        return stream_tensor(self.reader, spec, block_bytes=BLOCK_BYTES)

    def describe(self) -> ComparedSide:
        return ComparedSide(
            path=self.reader.path,
            layout=self.reader.layout,
            tensors=len(self.specs),
            objects=tuple(self.reader.objects),
            outside=self.outside,
            extra_states=self.extra_states,
            warnings=self.warnings,
        )


class _Comparer:
    """Goes through the names of both sides once and collects what it finds."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self._a = a
        self._b = b
        self._compared = 0
        self._compared_bytes = 0
        self._tied: list[TiedPair] = []

    def run(self) -> Comparison:
        differences = tuple(self._find_differences())
        return Comparison(
            a=self._a.describe(),
            b=self._b.describe(),
            compared=self._compared,
            compared_bytes=self._compared_bytes,
            tied=tuple(self._tied),
            differences=differences,
        )

    def _find_differences(self) -> Iterator[Problem]:
        for fqn, spec in self._a.specs.items():
            if fqn in self._b.specs:
                yield from self._find_pair_differences(fqn, spec, self._b.specs[fqn])
            else:
                yield from self._explain_absence(fqn, self._a, self._b)
        for fqn in self._b.specs:
            if fqn not in self._a.specs:
                yield from self._explain_absence(fqn, self._b, self._a)

    def _explain_absence(self, fqn: str, present: _Side, absent: _Side) -> Iterator[Problem]:
        """Yield the problem that `absent` lacks `fqn`, unless it stores the tensor under a tied name."""
        kind: ProblemKind = "missing_tensor" if present is self._a else "unexpected_tensor"
        spec = present.specs[fqn]
        message = f"{spec.dtype} of shape {spec.shape} is in {present.label} only"
        twin = find_twin(fqn, set(absent.specs))
        if twin is None:
            yield Problem(kind, fqn, message)
        elif denying := [side.label for side in (self._a, self._b) if denies_tying(side.reader.directory)]:
            labels = " and ".join(denying)
            yield Problem(kind, fqn, f"{message}; config.json of {labels} says that it is not tied to {twin}")
        elif reason := self._find_untied(present, spec, absent.specs[twin]):
            yield Problem(kind, fqn, f"{message}, and {twin} of {absent.label} is not the same tensor: {reason}")
        else:
            self._tied.append(TiedPair(fqn, twin, absent.label))

    def _find_untied(self, present: _Side, spec: TensorSpec, twin: TensorSpec) -> str | None:
        a, b = (spec, twin) if present is self._a else (twin, spec)
        problem = next(self._find_pair_differences(twin.fqn, a, b), None)
        return None if problem is None else problem.message

    def _find_pair_differences(self, fqn: str, a: TensorSpec, b: TensorSpec) -> Iterator[Problem]:
        if a.shape != b.shape:
            yield Problem("shape", fqn, f"A has shape {a.shape}, B has {b.shape}")
        if a.dtype != b.dtype:
            yield Problem("dtype", fqn, f"A has dtype {a.dtype}, B has {b.dtype}")
        if a.shape == b.shape and a.dtype == b.dtype and (diff := self._diff_values(a, b)) is not None:
            yield _describe_values(fqn, a, diff)

    def _diff_values(self, a: TensorSpec, b: TensorSpec) -> ValueDiff | None:
        self._compared += 1
        self._compared_bytes += a.nbytes
        try:
            return find_value_diff(self._a.stream(a), self._b.stream(b), dtype=a.dtype, numel=a.numel)
        except StreamLengthError as error:
            paths = f"{self._a.reader.path}, {self._b.reader.path}"
            message = f"{paths}: {a.fqn}: {error}; a file changed while it was read, so compare again"
            raise CorruptCheckpointError(message) from error


def _describe_values(fqn: str, spec: TensorSpec, diff: ValueDiff) -> ValueProblem:
    index = _unravel(diff.first, spec.shape)
    values = f"A has {render_element(spec.dtype, diff.a)}, B has {render_element(spec.dtype, diff.b)}"
    message = f"{diff.count} of {spec.numel} elements differ, the first at {index}: {values}"
    return ValueProblem("value", fqn, message, index, diff.count)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, inner = divmod(position, size)
        index.append(inner)
    return tuple(reversed(index))
