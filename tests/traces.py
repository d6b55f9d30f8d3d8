"""What was left behind: processes that outlive whoever started them, files where none belong."""

from __future__ import annotations

import os
import time
from pathlib import Path

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # end with Python


def processes_with(setting: str) -> dict[int, str]:
    """Living processes that were started with an environment variable, ``NAME=value``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        # One that has ended and is not cleared away yet has neither.
        if setting.encode() in environment and words and not any(h in words for h in HELPERS):
            found[int(entry.name)] = words[:200]
    return found


def assert_no_process_with(setting: str, seconds: float = 20) -> None:
    """The system takes a moment to clear away what was ended."""
    end = time.monotonic() + seconds
    while (left := processes_with(setting)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"still there after {seconds:g} seconds: {left}"


def files_in(*folders: Path) -> set[str]:
    """Every file and link in some folders."""
    return {
        str(file)
        for folder in folders
        for file in folder.rglob("*")
        if file.is_symlink() or not file.is_dir()
    }
