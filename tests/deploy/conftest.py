"""Processes that must not be left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path


def assert_none_alive(mark: str) -> None:
    """The system takes a moment to clear away what was killed."""
    end = time.monotonic() + 3
    while (left := alive(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def alive(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line:
                found.append(int(entry.name))
    return found
