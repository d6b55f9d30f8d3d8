"""Writer: work for the disk, done in a thread of its own.

What fails there is told to whoever gave the work, and nothing else: it never raises. Where more
than `MOST_WAITING` bytes would have to be held in memory the training waits for it, but no longer
than `PATIENCE`: what a disk that hangs cannot take by then is not kept.

The thread has the priority of its process. One that stood behind others would hold the
interpreter's lock while it waits for a core, and everybody's round with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 2 * 2**30
PATIENCE = 30.0  # seconds, of all that the training may wait in a row


class Writer:
    """One thread and one queue; ``failed`` is called with what went wrong, and where."""

    def __init__(self, name: str, failed: Callable[[str, Exception], None]):
        self._pool = ThreadPoolExecutor(1, name)
        self._failed = failed
        self._waiting = 0
        self._changed = threading.Condition()
        self._late = False  # the last wait was in vain: the next does not begin
        self._last: Future[None] | None = None

    def submit(self, what: str, task: Callable[[], None], size: int = 0) -> bool:
        """Do this after all that was given before; ``size`` bytes are held until then. False where
        there is no room for them, which is told as a failure."""
        with self._changed:
            room = self._changed.wait_for(lambda: self._has_room(size), self._patience())
            self._late = not room
            if room:
                self._waiting += size
        if not room:
            with contextlib.suppress(Exception):
                self._failed(what, TimeoutError("the disk is too slow, and the memory for it full"))
            return False
        try:
            self._last = self._pool.submit(self._do, what, task, size)
        except RuntimeError:  # the interpreter is going down: there are no threads any more
            self._do(what, task, size)
        return True

    def _has_room(self, size: int) -> bool:
        return not size or not self._waiting or self._waiting + size <= MOST_WAITING

    def _patience(self) -> float:
        return 0.0 if self._late else PATIENCE

    def _do(self, what: str, task: Callable[[], None], size: int) -> None:
        try:
            task()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._failed(what, error)
        finally:
            with self._changed:
                self._waiting -= size
                self._changed.notify_all()

    def settle(self) -> None:
        """Return when all that was given is done."""
        if self._last is not None:
            self._last.result()
