"""A comparison as lines for a person, and as JSON for a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_core.errors import Problem
from ckpt_core.terminal import join_lines, list_some

from ckpt_verify.comparison import ComparedSide, Comparison

_SHOWN = 20
_NAMED = 5


def render_comparison(comparison: Comparison) -> str:
    """Return the report of a comparison: both sides, the verdict, and the first 20 differences."""
    return join_lines(_render_lines(comparison))


def build_comparison_json(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as JSON types, with every difference."""
    return {
        "equal": comparison.is_equal,
        "a": _build_side(comparison.a),
        "b": _build_side(comparison.b),
        "compared": {"tensors": comparison.compared, "bytes": comparison.compared_bytes},
        "tied": [{"fqn": t.fqn, "twin": t.twin, "stored_once_in": t.stored_once_in} for t in comparison.tied],
        "counts": comparison.counts,
        "differences": [problem.to_json() for problem in comparison.differences],
    }


def _build_side(side: ComparedSide) -> dict[str, object]:
    return {
        "path": str(side.path),
        "layout": side.layout.value,
        "tensors": side.tensors,
        "not_compared": {
            "objects": list(side.objects),
            "outside": list(side.outside),
            "extra_states": list(side.extra_states),
        },
        "warnings": [problem.to_json() for problem in side.warnings],
    }


def _render_lines(comparison: Comparison) -> Iterator[str]:
    sides = (("A", comparison.a), ("B", comparison.b))
    for label, side in sides:
        yield f"{label}  {side.layout.value:<20} {side.tensors:>7,} tensors   {side.path}"
    for label, side in sides:
        yield from _render_side_notes(label, side)
    for tied in comparison.tied:
        yield f"note: {tied.fqn} equals {tied.twin}, which {tied.stored_once_in} stores once for both"
    yield _render_verdict(comparison)
    yield from _render_differences(comparison.differences)


def _render_side_notes(label: str, side: ComparedSide) -> Iterator[str]:
    if side.objects:
        yield f"note: {label}: not compared, no tensors: {_join(side.objects)}"
    if side.outside:
        yield f"note: {label}: not compared, beside the model: {_join(side.outside)}"
    if side.extra_states:
        yield f"note: {label}: not compared, extra states of modules: {_join(side.extra_states)}"
    for warning in side.warnings:
        yield f"warning: {label}: {warning}"


def _join(names: Sequence[str]) -> str:
    return ", ".join(list_some(names, _NAMED))


def _render_verdict(comparison: Comparison) -> str:
    extent = f"tensors: {comparison.compared:,}, bytes: {comparison.compared_bytes:,}"
    if comparison.is_equal:
        return f"equal, bit for bit ({extent})"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items())
    return f"different: {counts} (compared {extent})"


def _render_differences(differences: Sequence[Problem]) -> Iterator[str]:
    width = max((len(problem.kind) for problem in differences[:_SHOWN]), default=0)
    lines = [f"{problem.kind:<{width}}  {problem}" for problem in differences]
    yield from (f"  {line}" for line in list_some(lines, _SHOWN))
