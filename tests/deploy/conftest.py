"""Processes that must not be left behind, and another user of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def by_nobody() -> Iterator[None]:
    """What is done meanwhile is done by a user without rights; only root can arrange it."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
