"""`python -m ckpt_verify.demo [DIRECTORY]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

_NEEDED = 2


def main() -> int:
    """Run the demo; 0 if everything came out equal, 1 if not, 2 if it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_verify.demo", description="The main job on a tiny model.")
    parser.add_argument("directory", nargs="?", type=Path, help="a new directory to keep the files in")
    directory: Path | None = parser.parse_args().directory
    try:
        from ckpt_verify.demo.main_job import run_demo  # noqa: PLC0415  imports the training stack, which is an extra
    except ImportError as error:
        print(f"{parser.prog}: trains a model, and for that install ckpt-verify[demo]: {error}", file=sys.stderr)
        return _NEEDED
    if directory is not None:
        directory.mkdir(parents=True)
        return run_demo(directory.resolve())
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as temporary:
        return run_demo(Path(temporary))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the training processes share the cores
    sys.exit(main())
