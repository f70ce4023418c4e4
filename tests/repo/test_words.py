from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = (
    "/work/",  # paths of one machine
    "/tmp/",  # noqa: S108  a word to look for
    "/root/",
    "/home/",
    "issue #",  # a tracker that a reader cannot open
    "pypi.org",  # hosts that whoever installs chooses
    "pythonhosted",
    "download.pytorch",
    "todo",
    "fixme",
)


def list_tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  our own clone
    return [ROOT / name for name in names.split("\0") if name and ROOT / name != Path(__file__)]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_tracked_text_file_says(word: str) -> None:
    texts = {path: path.read_bytes().decode("utf-8", "ignore").lower() for path in list_tracked() if path.is_file()}
    assert len(texts) > 10
    assert not [str(path.relative_to(ROOT)) for path, text in texts.items() if word in text]
