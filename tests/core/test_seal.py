"""The seal: inherited by threads, of a thread and not of a context, and never of the others."""

from __future__ import annotations

import _thread
import contextvars
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedsim.core.errors import NotGranted
from fedsim.core.seal import is_sealed, refuse_attacks, seal_process, sealed


def by_thread() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_sealed()))
    thread.start()
    thread.join()
    return found[0]


class Own(threading.Thread):
    """A thread with a `run` of its own."""

    found = False

    def run(self) -> None:
        self.found = is_sealed()


def by_own_class() -> bool:
    thread = Own()
    thread.start()
    thread.join()
    return thread.found


def by_timer() -> bool:
    found: list[bool] = []
    timer = threading.Timer(0, lambda: found.append(is_sealed()))
    timer.start()
    timer.join()
    return found[0]


def by_pool() -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(is_sealed).result()


def by_bare_thread() -> bool:
    found: list[bool] = []
    done = threading.Event()

    def look(word: str, *, other: str) -> None:
        found.append(is_sealed() and (word, other) == ("one", "two"))
        done.set()

    _thread.start_new_thread(look, ("one",), {"other": "two"})
    done.wait()
    return found[0]


def by_thread_of_a_thread() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(by_thread()))
    thread.start()
    thread.join()
    return found[0]


def by_empty_context() -> bool:
    return contextvars.Context().run(is_sealed)


def forked(look: Callable[[], bool]) -> bool:
    """What a copy of this process finds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(look()))
    process.start()
    process.join()
    return bool(ours.recv())


def by_fork() -> bool:
    return forked(is_sealed)


WAYS = [
    by_thread,
    by_own_class,
    by_timer,
    by_pool,
    by_bare_thread,
    by_thread_of_a_thread,
    by_empty_context,
    by_fork,
]


@pytest.mark.parametrize("way", WAYS)
def test_there_is_no_way_out_by_threads_or_contexts(way: Callable[[], bool]) -> None:
    assert not is_sealed()
    with sealed():
        assert way()
    assert not is_sealed()


@pytest.mark.parametrize("way", [by_thread, by_pool, by_timer])
def test_what_is_started_outside_is_not_sealed(way: Callable[[], bool]) -> None:
    with sealed():
        pass
    assert not way()


def test_threads_that_work_beside_an_attack_are_left_alone() -> None:
    asked, answered, found = threading.Event(), threading.Event(), list[bool]()

    def scoring() -> None:
        asked.wait()
        found.append(is_sealed())
        found.append(by_thread())
        answered.set()

    other = threading.Thread(target=scoring)
    other.start()
    with sealed():
        asked.set()
        answered.wait()
    other.join()
    assert found == [False, False]


def test_a_thread_that_outlives_the_attack_stays_sealed() -> None:
    over, found = threading.Event(), list[bool]()

    def lurk() -> None:
        over.wait()
        found.append(is_sealed())

    with sealed():
        thread = threading.Thread(target=lurk)
        thread.start()
    assert not is_sealed()
    over.set()
    thread.join()
    assert found == [True]


def test_a_seal_in_a_seal_opens_nothing() -> None:
    with sealed():
        with sealed():
            pass
        with pytest.raises(NotGranted, match="tried to open the vault"):
            refuse_attacks()
    refuse_attacks()


def test_a_process_for_attacks_is_sealed_as_a_whole() -> None:
    def look() -> bool:
        go, found = threading.Event(), list[bool]()
        early = threading.Thread(target=lambda: (go.wait(), found.append(is_sealed())))
        early.start()
        before = is_sealed()
        seal_process()
        go.set()
        early.join()
        return not before and is_sealed() and by_thread() and found == [True]

    assert forked(look)
    assert not is_sealed()
