"""Processes: children that are servers, started apart, watched, and ended with all they started.

A process id alone says little, because ids are used again; with the moment it began, it names one
process and no other.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fedsim.cluster.bound import bound

LOOPBACK = "127.0.0.1"
LARGEST = 2**31 - 1  # a number of a process
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class Child:
    """A process that leads a group of its own, and when it began."""

    pid: int
    began: float | None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Child:
        """A child that was written down; a ValueError, KeyError or TypeError where none was.

        Numbers below two are no child's, and to whoever sends a signal some of them are all.
        """
        pid, moment = told["pid"], told["began"]
        if isinstance(pid, bool | float) or not 1 < int(pid) <= LARGEST:
            raise ValueError(f"{pid} is no child")
        return cls(int(pid), None if moment is None else float(moment))

    @property
    def lives(self) -> bool:
        now = began(self.pid)
        # Setting the system clock right shifts the moment a little.
        return now is not None and self.began is not None and abs(now - self.began) < 5


def spawn(
    command: list[str], log: Path, environment: Mapping[str, str], *, outlives: bool = True
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; all it says goes into ``log``. One that ``outlives``
    this process stays up when that is killed; another ends with it, where the system can do
    that."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            command if outlives else bound(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def child_of(process: subprocess.Popen[bytes]) -> Child:
    return Child(process.pid, began(process.pid))


def end(child: Child, seconds: float = 15) -> None:
    """Ask a process and all that descends from it to end, then make them."""
    family = {child, *descendants(child.pid)}
    signal_group(child.pid, signal.SIGTERM)
    for _ in tries(seconds):
        with contextlib.suppress(ChildProcessError):  # it need not be a child of this process
            os.waitpid(child.pid, os.WNOHANG)
        if not child.lives:
            break
    family = family.union(*(descendants(one.pid) for one in family if one.lives))
    signal_group(child.pid, signal.SIGKILL)  # what it left in its group
    for one in family:
        if one.lives:  # otherwise its id may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    for _ in tries(seconds):  # a process that was killed takes a moment to be gone
        if not any(one.lives for one in family):
            break


def signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def descendants(pid: int) -> set[Child]:
    """Every living process under one."""
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    return {Child(one.pid, began(one.pid)) for one in processes}


def began(pid: int) -> float | None:
    """When a process began; None where it is gone."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in DEAD else process.create_time()
    except psutil.NoSuchProcess:
        return None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def answers(port: int, host: str = LOOPBACK) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def tries(seconds: float) -> Iterator[None]:
    """Again and again, until the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.1)


def said(log: Path) -> str:
    """What a log says, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in said(log).splitlines()]
    return next((line for line in reversed(lines) if re.search(r"\w", line)), "it said nothing")
