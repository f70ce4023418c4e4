"""One way to read every layout: `open_checkpoint(path)`.

A reader knows a checkpoint from its metadata alone. Opening reads no tensor bytes; what
the metadata says is checked by `check()`, and where a chunk's elements lie is answered by
`locate()`, which reads that chunk's header. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from ckpt_core.adapter import AdapterReader
from ckpt_core.dcp_reader import DcpReader
from ckpt_core.errors import CheckpointError, LayoutError, Problem
from ckpt_core.layout import CheckpointLayout, detect_layout
from ckpt_core.safetensors_reader import SafetensorsReader
from ckpt_core.sharded_reader import ShardedSafetensorsReader
from ckpt_core.spec import Chunk, Nesting, ObjectSpec, TensorData, TensorSpec


class CheckpointReader(Protocol):
    """A checkpoint of one layout, read-only.

    Everything a layout needs to know about its files lives behind this: the pickle of a
    DCP, the headers of safetensors, the index. Names are as stored; taking prefixes or
    nesting off is for `ckpt_core.key_mapping`, with `nesting` saying which is which.
    """

    @property
    def path(self) -> Path:
        """The directory (or single file) that holds the layout."""

    @property
    def directory(self) -> Path:
        """The directory that the names of its files are relative to."""

    @property
    def layout(self) -> CheckpointLayout:
        """Which layout it is."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by stored FQN, in stored order; chunks without elements are left out."""

    @property
    def objects(self) -> Mapping[str, ObjectSpec]:
        """Every entry that is no tensor, by stored FQN."""

    @property
    def nesting(self) -> Mapping[str, Nesting]:
        """Path of each FQN in the nested state dict it was saved from; empty if unknown."""

    def check(self) -> list[Problem]:
        """Everything that is wrong or doubtful, from metadata and file sizes alone."""

    def locate(self, spec: TensorSpec, chunk: Chunk) -> TensorData:
        """Find the elements of `chunk`; reads at most the chunk's own header."""


_READERS: Mapping[CheckpointLayout, Callable[[Path], CheckpointReader]] = {
    CheckpointLayout.DCP: DcpReader,
    CheckpointLayout.SAFETENSORS: SafetensorsReader,
    CheckpointLayout.SAFETENSORS_SHARDED: ShardedSafetensorsReader,
    CheckpointLayout.ADAPTER: AdapterReader,
}
"""A new layout is one reader and one line here."""


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open the one checkpoint at or below `path`, whatever its layout; reads metadata only.

    Args:
        path: Anything that `ckpt_core.layout.detect_layout` finds its way from.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        LayoutError: No layout that can be read, or several candidates; the message lists them.
        CorruptCheckpointError, UnsafePickleError: The metadata cannot be used.
    """
    detected = detect_layout(path)
    reader = _READERS.get(detected.layout)
    if reader is None:
        raise LayoutError(
            f"{detected.path}: expected {', '.join(_READERS)}, found pickled {detected.layout} files,"
            " which are not read here; save them as safetensors first"
        )
    try:
        return reader(detected.path)
    except CheckpointError:
        raise
    except OSError as err:
        raise LayoutError(
            f"{err.filename or detected.path}: cannot be looked into: {err.strerror}; check the permissions"
        ) from err
