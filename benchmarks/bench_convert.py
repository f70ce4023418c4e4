"""How long does a conversion take beside a copy of the same bytes, and how much memory?

Whole processes in alternation with the copy that they are compared to: `cp -r`, then a sync
of each copied file, which is the durability that publishing has. Times are wall clock,
memory is the peak that the operating system reports, ratios are medians over pairs.

    nox -s bench -- --size 2.3GB --pairs 5 --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from ckpt_convert.byte_sizes import parse_size
from ckpt_core.terminal import format_bytes

CONVERT = [sys.executable, "-m", "ckpt_convert", "--quiet"]
COPY = ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +']


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the table."""

    name: str
    command: list[str]
    cut: str = "rows"
    goal: float | None = None
    """The largest acceptable ratio."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line: seconds, and bytes of peak memory."""

    job: str
    source_bytes: int
    seconds: float
    copy_seconds: float
    ratio: float
    goal: float | None
    peak_bytes: int
    pairs: list[tuple[float, float]]


JOBS = [
    Job("DCP to safetensors, --no-verify", [*CONVERT, "--no-verify"], goal=0.8),
    Job("DCP to safetensors, verified", CONVERT, goal=1.0),
    Job("DCP cut by columns to safetensors, verified", CONVERT, cut="columns"),
    Job("cp -r without a sync", ["cp", "-r"]),
]


def measure(command: list[str], source: Path, target: Path) -> tuple[float, int]:
    """Run `command source target` once; return seconds and the peak memory in bytes."""
    # What an earlier run left to write is not this one's.
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen([*command, str(source), str(target)], stderr=subprocess.DEVNULL)  # noqa: S603  our own
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{command} failed with status {status}")
    shutil.rmtree(target)
    return seconds, usage.ru_maxrss * 1024


def measure_job(job: Job, source: Path, target: Path, pairs: int) -> Row:
    """Run `job` and the copy in alternation."""
    times = []
    peak = 0
    for _ in range(pairs):
        copied, _ = measure(COPY, source, target)
        seconds, memory = measure(job.command, source, target)
        times.append((seconds, copied))
        peak = max(peak, memory)
        print(f"{job.name}: {seconds:.2f} s, copy {copied:.2f} s, {format_bytes(memory)}", file=sys.stderr)
    return Row(
        job.name,
        sum(path.stat().st_size for path in source.iterdir()),
        median(seconds for seconds, _ in times),
        median(copied for _, copied in times),
        median(seconds / copied for seconds, copied in times),
        job.goal,
        peak,
        times,
    )


def describe_machine() -> str:
    """Name the processor and how many of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"


def render_table(rows: list[Row], machine: str) -> str:
    """Write the rows as Markdown."""
    lines = [
        f"Measured on {machine}, Python {platform.python_version()}; the copy is `cp -r` and a sync of each file.",
        "",
        "| job | bytes | time | copy | ratio | goal | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal = "-" if row.goal is None else f"<= {row.goal}"
        times = f"{row.seconds:.2f} s | {row.copy_seconds:.2f} s | {row.ratio:.2f}"
        lines.append(
            f"| {row.job} | {format_bytes(row.source_bytes)} | {times} | {goal} | {format_bytes(row.peak_bytes)} |"
        )
    return "\n".join(lines) + "\n"


def measure_all(size: int, pairs: int, folder: Path) -> list[Row]:
    """Make the sources under `folder` and measure every job."""
    rows = []
    for cut in dict.fromkeys(job.cut for job in JOBS):
        source = folder / cut
        maker = [sys.executable, "-m", "benchmarks.llama_dcp", str(source), str(size), cut]
        subprocess.run(maker, check=True)  # noqa: S603  our own
        rows += [measure_job(job, source, folder / "out", pairs) for job in JOBS if job.cut == cut]
        shutil.rmtree(source)
    return rows


def main() -> None:
    """Measure, print the table, write it as Markdown and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2.3GB", help="bytes of tensors (default: 2.3GB)")
    parser.add_argument("--pairs", type=int, default=5, help="alternations of each job with the copy (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the tables")
    parser.add_argument("--work", type=Path, help="directory on the disk to measure (default: the temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        rows = measure_all(parse_size(options.size), options.pairs, Path(folder))
    machine = describe_machine()
    table = render_table(rows, machine)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "convert.md").write_text(table)
    content = {"machine": machine, "rows": [asdict(row) for row in rows]}
    (options.out / "convert.json").write_text(json.dumps(content, indent=2) + "\n")
    print(table)


if __name__ == "__main__":
    main()
