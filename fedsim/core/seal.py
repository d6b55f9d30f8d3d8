"""Seal: in the thread of a running attack, and in every thread that it starts, no vault opens.

Threads know nothing of each other's context, so a sealed thread hands its seal on as it starts
another. A process that works for attacks alone is sealed as a whole. This keeps out an attack that
asks where it may not; code that sets out to undo it can, as it runs in the same process.
"""

from __future__ import annotations

import _thread
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedsim.core.errors import NotGranted


class _Mark(threading.local):
    """How often the thread at hand was sealed; a context could be left, a thread cannot."""

    depth = 0


_mark = _Mark()
_process = threading.Event()  # set where all of the process is sealed
_handing, _handed = threading.Lock(), threading.Event()  # set once threads hand on their seal


@contextmanager
def sealed() -> Iterator[None]:
    """While this lasts, no vault opens in this thread or in one that is started in it."""
    if not _handed.is_set():
        _hand_on()
    _mark.depth += 1
    try:
        yield
    finally:
        _mark.depth -= 1


def seal_process() -> None:
    """No vault opens in this process again, whichever thread asks."""
    _process.set()


def is_sealed() -> bool:
    return _process.is_set() or _mark.depth > 0


def refuse_attacks() -> None:
    """Raise where an attack asks for what is the vault's."""
    if is_sealed():
        raise NotGranted("an attack tried to open the vault.")


def _hand_on() -> None:
    """From here on, a thread that is started by a sealed one is sealed until it ends."""
    if not _handing.acquire(blocking=False):
        _handed.wait()
        return
    start, start_bare = threading.Thread.start, _thread.start_new_thread

    @functools.wraps(start)
    def start_thread(self: threading.Thread) -> None:
        if is_sealed():
            self.run = functools.partial(_within, self.run)  # type: ignore[method-assign]
        start(self)

    @functools.wraps(start_bare)
    def start_new_thread(function: Callable[..., Any], *arguments: Any) -> int:
        within = functools.partial(_within, function) if is_sealed() else function
        return start_bare(within, *arguments)

    threading.Thread.start = start_thread  # type: ignore[method-assign]
    _thread.start_new_thread = start_new_thread
    _handed.set()


def _within(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with sealed():
        return function(*arguments, **named)
