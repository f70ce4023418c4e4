"""Is what was written what the source holds?

The source is read once, in row-major order and by another way than most of it was copied;
the output is read back beside it. Blocks that are equal go into the digest of their tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_core.digest import TensorDigest
from ckpt_core.errors import Problem, VerificationError
from ckpt_core.reader import CheckpointReader
from ckpt_core.stream import stream_tensor

from ckpt_convert.assets import Asset
from ckpt_convert.byte_copy import read_bytes
from ckpt_convert.copy_tensors import open_file
from ckpt_convert.output_files import PlannedFile, PlannedTensor
from ckpt_convert.parallel import Meter, Workers


def verify_files(
    files: tuple[PlannedFile, ...],
    reader: CheckpointReader,
    directory: Path,
    workers: Workers,
) -> dict[str, str]:
    """Compare every file of a plan with the source.

    Args:
        files: What was to be written.
        reader: The source that the plan was made from.
        directory: Where it was written.
        workers: Who compares, each with two blocks; told about every byte of the output.

    Returns:
        Digest of each tensor by the name it has in the output.

    Raises:
        VerificationError: Something differs; `problems` names every tensor with its first
            differing byte.
    """
    digests: dict[str, str] = {}
    problems = [problem for file in files for problem in _check_frame(file, directory / file.name)]

    def compare(item: tuple[PlannedFile, PlannedTensor]) -> None:
        file, tensor = item
        with open_file(directory / file.name, os.O_RDONLY) as written:
            blocks = _meter_blocks(stream_tensor(reader, tensor.spec, block_bytes=workers.block_bytes), workers.meter)
            result = _digest_equal(tensor, written, blocks)
        if isinstance(result, Problem):
            problems.append(result)
        else:
            digests[tensor.fqn] = result

    workers.run(((file, tensor) for file in files for tensor in file.tensors), compare)
    if problems:
        raise VerificationError(
            f"{directory}: what was written differs from {reader.path}; nothing was published. Either the source "
            "changed in the meantime or the storage returns other bytes than were written: convert again",
            problems=problems,
        )
    return digests


def _check_frame(file: PlannedFile, path: Path) -> Iterator[Problem]:
    found = path.stat().st_size
    if found != file.size:
        yield Problem("short_file" if found < file.size else "long_file", file.name, f"{found} of {file.size} bytes")
    with path.open("rb") as written:
        if written.read(len(file.header)) != file.header:
            yield Problem("bad_header", file.name, "the header differs from the one that was written")


def _digest_equal(tensor: PlannedTensor, written: int, blocks: Iterable[bytes | bytearray]) -> str | Problem:
    digest = TensorDigest(tensor.spec.dtype, tensor.spec.shape)
    done = 0
    found = bytearray()
    for block in blocks:
        if len(found) != len(block):
            found = bytearray(len(block))
        count = read_bytes(written, tensor.offset + done, memoryview(found))
        # bytearray compares whole buffers at once; memoryview would compare item by item.
        if count < len(block) or found != block:
            first = done + _find_difference(found, block)
            return Problem("value", tensor.fqn, f"byte {first:,} of {tensor.spec.nbytes:,} differs from the source")
        digest.update(found)
        done += len(block)
    if done != tensor.spec.nbytes:
        return Problem("value", tensor.fqn, f"the source gave {done:,} of {tensor.spec.nbytes:,} bytes")
    return digest.finish()


def _find_difference(found: bytearray, block: bytes | bytearray) -> int:
    return next((i for i, (a, b) in enumerate(zip(found, block, strict=True)) if a != b), 0)


def _meter_blocks(blocks: Iterable[bytes | bytearray], meter: Meter) -> Iterator[bytes | bytearray]:
    for block in blocks:
        yield block
        meter.advance(len(block))


def verify_assets(assets: tuple[Asset, ...], directory: Path) -> None:
    """Compare the copied small files with their sources.

    Raises:
        VerificationError: One differs.
    """
    for asset in assets:
        if (directory / asset.name).read_bytes() != asset.source.read_bytes():
            raise VerificationError(f"{asset.name}: the copy differs from {asset.source}; nothing was published")
