"""Writer: work for the disk, done in a thread of its own, as a rule behind everybody else.

What fails there is told to whoever gave the work, and nothing else: it never raises, and it never
holds up the training but where more than `MOST_WAITING` bytes would have to be held in memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from fedsim.core.device import stand_back

MOST_WAITING = 2 * 2**30


def _stand_back() -> None:
    with contextlib.suppress(OSError):
        stand_back()


class Writer:
    """One thread and one queue; ``failed`` is called there with what went wrong, and where."""

    def __init__(self, name: str, failed: Callable[[str, Exception], None], *, behind: bool = True):
        self._pool = ThreadPoolExecutor(1, name, initializer=_stand_back if behind else None)
        self._failed = failed
        self._waiting = 0
        self._changed = threading.Condition()
        self._last: Future[None] | None = None

    def submit(self, what: str, task: Callable[[], None], size: int = 0) -> None:
        """Do this after all that was given before; ``size`` bytes are held until then."""
        with self._changed:
            while self._waiting and self._waiting + size > MOST_WAITING:
                self._changed.wait()
            self._waiting += size
        try:
            self._last = self._pool.submit(self._do, what, task, size)
        except RuntimeError:  # the interpreter is going down: there are no threads any more
            self._do(what, task, size)

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
