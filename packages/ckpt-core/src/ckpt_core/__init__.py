"""Recognise, read, save and load distributed PyTorch checkpoints.

`open_checkpoint(path)` gives a `CheckpointReader` for any layout: its `tensors` are
`TensorSpec` values, known without reading a tensor and without importing torch. `check()`
lists what is wrong, `stream_tensor` gives the bytes of a tensor in bounded memory, and
`read_tensor` the tensor itself. `AutomodelCheckpointManager` saves and loads live models; it
needs the extra `ckpt-core[automodel]`, and is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_core.adapter import AdapterConfig, read_adapter_config
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    KeyMismatchError,
    LayoutError,
    LoadError,
    LockHeldError,
    Problem,
    SaveError,
    SpaceError,
    TargetError,
    UnsafePickleError,
    VerificationError,
)
from ckpt_core.inspect import Inspection, inspect_checkpoint
from ckpt_core.key_mapping import CanonicalNames, find_canonical_names, strip_wrapper_prefixes
from ckpt_core.layout import CheckpointLayout, DetectedLayout, detect_checkpoint_format, detect_layout
from ckpt_core.reader import CheckpointReader, open_checkpoint
from ckpt_core.spec import Chunk, ObjectSpec, StoredRange, TensorData, TensorSpec
from ckpt_core.stream import read_tensor, stream_tensor, tensors_equal

if TYPE_CHECKING:
    from ckpt_core.manager import AutomodelCheckpointManager

__all__ = [
    "AdapterConfig",
    "AutomodelCheckpointManager",
    "CanonicalNames",
    "CheckpointError",
    "CheckpointLayout",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "Chunk",
    "ConfigError",
    "CorruptCheckpointError",
    "DetectedLayout",
    "Inspection",
    "KeyMismatchError",
    "LayoutError",
    "LoadError",
    "LockHeldError",
    "ObjectSpec",
    "Problem",
    "SaveError",
    "SpaceError",
    "StoredRange",
    "TargetError",
    "TensorData",
    "TensorSpec",
    "UnsafePickleError",
    "VerificationError",
    "detect_checkpoint_format",
    "detect_layout",
    "find_canonical_names",
    "inspect_checkpoint",
    "open_checkpoint",
    "read_adapter_config",
    "read_tensor",
    "stream_tensor",
    "strip_wrapper_prefixes",
    "tensors_equal",
]


_LAZY = {"AutomodelCheckpointManager": "ckpt_core.manager"}
"""Names whose modules import nemo_automodel, which takes 10 seconds and 3 GB of packages."""


def __getattr__(name: str) -> object:
    """Import on request what costs more than everything else here together."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  see above

        return version("ckpt-core")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
