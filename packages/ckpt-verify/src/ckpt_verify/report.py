"""A comparison as lines for a person, and as JSON for a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_core.errors import CheckpointError, Problem
from ckpt_core.inspect import escape_controls

from ckpt_verify.comparison import ComparedSide, Comparison, ValueProblem

_SHOWN = 20


def render_comparison(comparison: Comparison) -> str:
    """Return the report of a comparison: both sides, the verdict, and the first 20 differences."""
    return "\n".join(escape_controls(line) for line in _render_lines(comparison))


def render_error(error: CheckpointError) -> str:
    """Return the message of an error, each of its lines free of control characters."""
    return "\n".join(escape_controls(line) for line in str(error).split("\n"))


def build_comparison_json(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as JSON types, with every difference."""
    return {
        "equal": comparison.is_equal,
        "a": _build_side(comparison.a),
        "b": _build_side(comparison.b),
        "compared": {"tensors": comparison.compared, "bytes": comparison.compared_bytes},
        "tied": [{"fqn": t.fqn, "twin": t.twin, "stored_once_in": t.stored_once_in} for t in comparison.tied],
        "counts": comparison.counts,
        "differences": build_problems_json(comparison.differences),
    }


def build_problems_json(problems: Sequence[Problem]) -> list[dict[str, object]]:
    """Return problems as JSON types."""
    return [_build_problem(problem) for problem in problems]


def _build_problem(problem: Problem) -> dict[str, object]:
    built: dict[str, object] = {"kind": problem.kind, "where": problem.where, "message": problem.message}
    if isinstance(problem, ValueProblem):
        built |= {"index": list(problem.index), "count": problem.count}
    return built


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
        "warnings": build_problems_json(side.warnings),
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
        yield f"note: {label}: not compared, no tensors: {_list_first(side.objects)}"
    if side.outside:
        yield f"note: {label}: not compared, beside the model: {_list_first(side.outside)}"
    if side.extra_states:
        yield f"note: {label}: not compared, extra states of modules: {_list_first(side.extra_states)}"
    for warning in side.warnings:
        yield f"warning: {label}: {warning}"


def _list_first(names: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _render_verdict(comparison: Comparison) -> str:
    extent = f"tensors: {comparison.compared:,}, bytes: {comparison.compared_bytes:,}"
    if comparison.is_equal:
        return f"equal, bit for bit ({extent})"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items())
    return f"different: {counts} (compared {extent})"


def _render_differences(differences: Sequence[Problem]) -> Iterator[str]:
    shown = differences[:_SHOWN]
    width = max((len(problem.kind) for problem in shown), default=0)
    for problem in shown:
        yield f"  {problem.kind:<{width}}  {problem}"
    if len(differences) > _SHOWN:
        yield f"  ... and {len(differences) - _SHOWN:,} more"
