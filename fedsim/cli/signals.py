"""Signals: a command that is told to end first puts away what it started.

A closed terminal sends SIGHUP, and whoever stops a service sends SIGTERM. By default either ends a
process on the spot, and its children would go on without it; here both are what Ctrl-C is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

KINDS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Somebody asked this process to end."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}.")
        self.exit_code = 128 + number


class Asked:
    """Whether a signal came, however the exception that it was fared on its way."""

    stopped: Stopped | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        for kind in KINDS:  # what is put away must not be left halfway because of a second one
            if signal.getsignal(kind) == self.handle:
                signal.signal(kind, signal.SIG_IGN)
        self.stopped = Stopped(number)
        raise self.stopped

    def check(self) -> None:
        """Raise again what another made an ordinary end of."""
        if self.stopped is not None:
            raise self.stopped


@contextmanager
def stoppable() -> Iterator[Asked]:
    """Inside, a signal to end is an exception; one that was ignored before, as under nohup, still
    is."""
    asked, before = Asked(), {}
    if threading.current_thread() is threading.main_thread():
        before = {kind: signal.getsignal(kind) for kind in KINDS}
    for kind, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(kind, asked.handle)
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            if handler == signal.SIG_DFL:
                signal.signal(kind, handler)
