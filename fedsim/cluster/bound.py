"""Bound: a program that ends with the process that started it, however that one ends.

A process that is killed can put nothing away; on Linux the kernel then sends its children a signal,
if they asked for it. This asks, as a program of its own that starts the one that is wanted and
waits for it: in a process that has threads, nothing of Python's may run between fork and exec. Told
to end, it ends all that descends from it, because a SuperLink leaves what it started behind, in
groups of their own. It imports nothing of fedsim.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_SECONDS = 5  # between asking a group to end and making it


def bound(command: list[str]) -> list[str]:
    """The command of a program that ends with the thread that starts it, where the system can do
    that."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", str(Path(__file__).absolute()), str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> int:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # lest others should be ended with it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until somebody can be told
    _end_with_the_parent()
    if os.getppid() != parent:  # it ended before it was asked for
        return 0
    try:
        child = subprocess.Popen(command, preexec_fn=_begin)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    signal.signal(signal.SIGTERM, lambda number, frame: _end_all())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = child.wait()
    return code if code >= 0 else 128 - code


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _begin() -> None:
    """In the child, before it is the program; it ends as well where this one is killed."""
    _end_with_the_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_all() -> None:
    """Ask everybody below to end, then make them, this one with them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    family = _descendants(os.getpid())
    _tell(family, signal.SIGTERM)
    until = time.monotonic() + _SECONDS
    while any(map(_lives, family)) and time.monotonic() < until:
        time.sleep(0.02)  # not by waiting for the child: whoever was interrupted does that
    _tell(family | _descendants(os.getpid()), signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


def _tell(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stat(pid: int | str) -> list[str]:
    """What the kernel says of a process: its state, its parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _stat(pid)[0] not in "ZX"  # one that has ended is there until it is waited for
    return False


def _descendants(root: int) -> set[int]:
    """Every process below one, by what the kernel says of parents."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int(_stat(entry.name)[1])
    found, waiting = set[int](), [root]
    while waiting:
        above = waiting.pop()
        below = {pid for pid, parent in parents.items() if parent == above} - found
        found |= below
        waiting += below
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
