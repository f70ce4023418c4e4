"""Carry out a plan: stage, stream, verify, record, publish.

Nothing is decided here: what is written, and where, stands in the plan. Whatever happens,
the target holds what it held before or the whole result.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from ckpt_core.errors import CheckpointError, translate_os_errors
from ckpt_core.layout import CheckpointLayout
from ckpt_core.record import CheckpointRecord, TensorRecord, measure_files, write_record
from ckpt_core.safetensors_header import INDEX_NAME
from ckpt_core.staging import Stage, require_free_space, stage_directory

from ckpt_convert.copy_tensors import write_files
from ckpt_convert.parallel import Meter, Workers, count_threads
from ckpt_convert.plan import DEFAULT_SHARD_SIZE, ConversionPlan, plan_conversion
from ckpt_convert.report import ConversionReport
from ckpt_convert.target_check import check_target
from ckpt_convert.verify_output import verify_assets, verify_files

_BUFFERS = 32 * 2**20
"""Bytes of all buffers together; each thread holds two."""
_BLOCK = 2**19
"""Comparing and digesting find these in the processor's cache; larger ones cost a page fault for every page."""


def convert(  # noqa: PLR0913  each is a flag of the command
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str = CheckpointLayout.SAFETENSORS,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    assets: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    threads: int = 2,
    progress: Callable[[int], object] = bool,
) -> ConversionReport:
    """Convert the checkpoint `src` to the directory `dst`, bit for bit.

    Plans with `plan_conversion`, carries out with `execute_plan`; arguments and errors are theirs.

    Returns:
        What was written, renamed and left out, with the digest of every verified tensor.
    """
    plan = plan_conversion(src, dst, to=to, max_shard_size=max_shard_size, assets=assets, overwrite=overwrite)
    return execute_plan(plan, verify=verify, threads=threads, progress=progress)


def execute_plan(
    plan: ConversionPlan, *, verify: bool = True, threads: int = 2, progress: Callable[[int], object] = bool
) -> ConversionReport:
    """Write what `plan` says and publish it.

    Args:
        plan: From `plan_conversion`.
        verify: Read everything back and compare it with the source before publishing.
        threads: How many threads copy, and later compare; more than 64 are not started.
        progress: Called with bytes as they are copied, and again as they are compared.

    Raises:
        ConfigError: `threads` is no number of threads.
        SpaceError: The file system cannot hold the result.
        TargetError: The target is taken or cannot be written, or another writer is at work on it.
        CorruptCheckpointError: The source contradicts its metadata or ends early.
        VerificationError: What was written differs from the source; nothing was published.
        SaveError: The storage reports an error.
    """
    require_runnable(plan, threads=threads)
    count = count_threads(threads)
    workers = Workers(count, min(_BLOCK, _BUFFERS // (2 * count)), Meter(progress))
    failure = f"nothing was published, as the conversion of {plan.source} failed"
    with translate_os_errors(plan.target, failure), stage_directory(plan.target, replace=plan.replaces) as stage:
        write_files(plan.files, plan.reader, stage.path, workers)
        _write_small_files(plan, stage.path)
        digests: Mapping[str, str] = {}
        if verify:
            verify_assets(plan.assets, stage.path)
            with _syncing(stage):
                digests = verify_files(plan.files, plan.reader, stage.path, workers)
        files = _write_record(plan, stage.path, digests)
        # Whatever came to the target in the meantime must not be lost.
        check_target(plan.target, (plan.source,), overwrite=plan.overwrite)
        stage.publish()
    return ConversionReport(plan, files, digests, verified=verify)


def require_runnable(plan: ConversionPlan, *, threads: int = 2) -> None:
    """Refuse what `execute_plan` would refuse before it writes.

    Raises:
        ConfigError: `threads` is no number of threads.
        SpaceError: The file system cannot hold the result.
    """
    count_threads(threads)
    require_free_space(plan.target, plan.disk_needed)


def _write_small_files(plan: ConversionPlan, directory: Path) -> None:
    if plan.index is not None:
        (directory / INDEX_NAME).write_bytes(plan.index)
    for asset in plan.assets:
        path = directory / asset.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(asset.source.read_bytes())


def _write_record(plan: ConversionPlan, directory: Path, digests: Mapping[str, str]) -> dict[str, int]:
    planned = (tensor for file in plan.files for tensor in file.tensors)
    tensors = {t.fqn: TensorRecord(t.spec.dtype, t.spec.shape, digests.get(t.fqn)) for t in planned}
    record = CheckpointRecord(
        tool_version=version("ckpt-convert"),
        files=measure_files(directory),
        tensors=tensors,
        source_layout=plan.source_layout,
    )
    write_record(directory, record)
    return dict(record.files)


@contextmanager
def _syncing(stage: Stage) -> Iterator[None]:
    """Let the storage write while the processor compares; publishing needs both."""
    errors: list[CheckpointError] = []

    def sync() -> None:
        try:
            stage.sync()
        except CheckpointError as error:
            errors.append(error)

    worker = threading.Thread(target=sync, name="ckpt-convert-sync")
    try:
        worker.start()
    except RuntimeError:
        # No thread to be had; publishing syncs what is not durable by then.
        yield
        return
    try:
        yield
    finally:
        worker.join()
    if errors:
        raise errors[0]
