"""What is this checkpoint: a summary as one value, and that value as text or JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from ckpt_core.adapter import AdapterConfig, read_adapter_config
from ckpt_core.errors import CheckpointError, Problem
from ckpt_core.key_mapping import Nesting, find_canonical_names
from ckpt_core.layout import CheckpointLayout
from ckpt_core.reader import CheckpointReader, open_checkpoint
from ckpt_core.terminal import format_bytes, join_lines, list_some

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class DtypeUsage:
    """Tensors of one dtype."""

    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint in numbers, and what is wrong with it."""

    path: str
    layout: CheckpointLayout
    tensors: int
    nbytes: int
    """Bytes of all tensors, each counted once."""
    parameters: int
    """Elements of all tensors."""
    dtypes: Mapping[str, DtypeUsage]
    chunks: int
    objects: tuple[str, ...]
    files: int
    """Files that hold tensors or objects."""
    nest: Nesting
    """Path in the saved state dict under which the model lies; `()` if at the top."""
    outside: int
    """Tensors elsewhere in the state dict, such as optimizer state."""
    adapter: AdapterConfig | None
    problems: tuple[Problem, ...]


def inspect_checkpoint(path: str | os.PathLike[str]) -> Inspection:
    """Summarize the checkpoint at or below `path` from its metadata; reads no tensor.

    Raises:
        CheckpointError: As `open_checkpoint`.
    """
    reader = open_checkpoint(path)
    specs = reader.tensors.values()
    canonical = find_canonical_names(reader.tensors, reader.nesting)
    files = {chunk.stored.file for spec in specs for chunk in spec.chunks}
    return Inspection(
        path=str(reader.path),
        layout=reader.layout,
        tensors=len(specs),
        nbytes=sum(spec.nbytes for spec in specs),
        parameters=sum(spec.numel for spec in specs),
        dtypes=_count_dtypes(reader),
        chunks=sum(len(spec.chunks) for spec in specs),
        objects=tuple(reader.objects),
        files=len(files | {entry.stored.file for entry in reader.objects.values()}),
        nest=canonical.nest,
        outside=len(canonical.outside),
        adapter=_find_adapter(reader),
        problems=(*reader.check(), *canonical.problems),
    )


def _count_dtypes(reader: CheckpointReader) -> Mapping[str, DtypeUsage]:
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for spec in reader.tensors.values():
        tensors[spec.dtype] += 1
        nbytes[spec.dtype] += spec.nbytes
    ranked = sorted(tensors, key=lambda dtype: (-nbytes[dtype], dtype))
    return MappingProxyType({dtype: DtypeUsage(tensors[dtype], nbytes[dtype]) for dtype in ranked})


def _find_adapter(reader: CheckpointReader) -> AdapterConfig | None:
    """Return the configuration of an adapter; a fault in it is among the problems already."""
    if reader.layout is not CheckpointLayout.ADAPTER:
        return None
    try:
        return read_adapter_config(reader.path)
    except CheckpointError:
        return None


def render_text(inspection: Inspection) -> str:
    """Render as aligned lines; no character of a checkpoint's own names acts on a terminal."""
    rows = [*_list_rows(inspection)]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}".rstrip(" ") for label, value in rows]
    return join_lines([*lines, *_list_problems(inspection.problems)])


def render_json(inspection: Inspection) -> dict[str, object]:
    """Render as JSON values; names are spelled as stored."""
    return {
        **{name: getattr(inspection, name) for name in ("path", "layout", "tensors", "nbytes", "parameters")},
        "dtypes": {dtype: asdict(usage) for dtype, usage in inspection.dtypes.items()},
        "chunks": inspection.chunks,
        "objects": list(inspection.objects),
        "files": inspection.files,
        "nest": list(inspection.nest),
        "outside": inspection.outside,
        "adapter": None if inspection.adapter is None else asdict(inspection.adapter),
        "problems": [problem.to_json() for problem in inspection.problems],
    }


def _list_rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "path", inspection.path
    yield "layout", inspection.layout
    yield "tensors", f"{inspection.tensors:,}, {inspection.parameters:,} elements, {format_bytes(inspection.nbytes)}"
    for dtype, usage in inspection.dtypes.items():
        yield f"  {dtype}", f"{usage.tensors:,}, {format_bytes(usage.nbytes)}"
    yield "chunks", f"{inspection.chunks:,} in {inspection.files:,} file{'s' * (inspection.files != 1)}"
    if inspection.objects:
        yield "objects", f"{len(inspection.objects):,}: {', '.join(list_some(inspection.objects, _SHOWN))}"
    if inspection.nest:
        yield "nested under", " / ".join(map(str, inspection.nest))
    if inspection.outside:
        yield "beside it", f"{inspection.outside:,} tensors that belong to no model"
    if inspection.adapter:
        yield from _list_adapter_rows(inspection.adapter)


def _list_adapter_rows(adapter: AdapterConfig) -> Iterator[tuple[str, str]]:
    yield "adapter", adapter.peft_type
    if adapter.r is not None:
        yield "  rank, alpha", f"{adapter.r}, {adapter.lora_alpha}"
    if adapter.target_modules:
        targets = adapter.target_modules
        yield "  modules", targets if isinstance(targets, str) else ", ".join(targets)
    if adapter.base_model_name_or_path:
        yield "  base", adapter.base_model_name_or_path


def _list_problems(problems: tuple[Problem, ...]) -> Iterator[str]:
    if not problems:
        yield "problems  none found"
        return
    yield f"problems  {len(problems):,}" + "; --json lists all" * (len(problems) > _SHOWN)
    lines = [f"{problem.severity}: {problem.kind}: {problem}" for problem in problems]
    yield from (f"  {line}" for line in list_some(lines, _SHOWN))
