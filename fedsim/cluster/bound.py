"""Bound: a program that ends with the process that started it, however that one ends.

A process that is killed can put nothing away; on Linux the kernel then sends its children a signal,
if they asked for it. This asks, as a program of its own that becomes the one that is wanted: in a
process that has threads, nothing of Python's may run between fork and exec. It imports nothing of
fedsim.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def bound(command: list[str]) -> list[str]:
    """The command of a program that ends with the thread that starts it, where the system can do
    that."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", str(Path(__file__).absolute()), str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was asked for
        return
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
