"""Watchdog: work in a thread of its own, that is given up when it hangs.

Python can raise an error in a thread that runs Python code: a loop without end is ended by that.
A thread that waits in code of another language cannot be ended from within its process. It is left
behind, with the memory and the processor time that it takes, until the process ends; should it ever
come back, it meets the error. Whoever wants more takes `engine.kind: ray`, where a worker is a
process.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from fedsim.campaign.pulse import HungError, Limits, Pulse
from fedsim.core.attack import Progress
from fedsim.core.errors import AttackCrashError
from fedsim.core.plain import plain_text

Result = TypeVar("Result")

LOOK_SECONDS = 0.5  # between two looks at the pulse
TRIES, TRY_SECONDS = 4, 0.5  # to end a thread: what runs in it may catch the error


class EndedError(BaseException):
    """Raised in a thread that was given up; no handler of ordinary errors catches it."""


def guarded(
    work: Callable[[Progress], Result], limits: Limits, progress: Progress, name: str = "attack"
) -> Result:
    """What ``work`` returns or raises; HungError where it hangs."""
    pulse, given_up = Pulse(limits), threading.Event()
    outcome: Future[Result] = Future()
    cpu_threads = torch.get_num_threads()

    ours: list[BaseException] = []  # what whoever watches raised, in the attack's thread

    def report(done: int, total: int, loss: float | None = None) -> None:
        if given_up.is_set():
            raise EndedError
        pulse.beat(total)
        try:
            progress(done, total, loss)
        except BaseException as error:
            ours.append(error)
            raise

    def run() -> None:
        try:
            torch.set_num_threads(cpu_threads)  # a count of each thread's own
            outcome.set_result(work(report))
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:
            # Ctrl-C reaches the thread that waits. One of the attack's own ends nothing but it.
            mine = isinstance(error, EndedError) or any(error is other for other in ours)
            outcome.set_exception(error if mine else broken_off(error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        while not wait([outcome], LOOK_SECONDS).done:
            if (why := pulse.overdue()) is not None:
                raise HungError(why)
    except BaseException:  # Ctrl-C as well: nothing goes on behind its back
        given_up.set()
        _end(thread)
        raise
    return outcome.result()


def broken_off(error: BaseException) -> AttackCrashError:
    """What is said of an attack that raised what no handler of ordinary errors catches."""
    return AttackCrashError(f"the attack raised {plain_text(type(error).__name__)}.")


def _end(thread: threading.Thread) -> None:
    """End a thread, as far as that can be done."""
    for _ in range(TRIES):
        if not thread.is_alive() or thread.ident is None:
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(EndedError)
        )
        thread.join(TRY_SECONDS)
