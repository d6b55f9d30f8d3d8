"""The writer: in order, in its own thread, and its failures are told and not raised."""

from __future__ import annotations

import os
import threading

import pytest

from fedsim.captures import writer as writers
from fedsim.captures.writer import Writer


def test_what_fails_is_told_and_the_rest_is_done() -> None:
    done: list[int] = []
    failed: list[tuple[str, str]] = []
    writer = Writer("test", lambda what, error: failed.append((what, str(error))))

    def broken() -> None:
        raise OSError("no room")

    writer.submit("one", lambda: done.append(1), 10)
    writer.submit("two", broken, 10)
    writer.submit("three", lambda: done.append(threading.get_ident()))
    writer.settle()
    assert done[0] == 1
    assert done[1] != threading.get_ident()
    assert failed == [("two", "no room")]


def test_a_disk_that_hangs_does_not_hold_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MOST_WAITING", 10)
    monkeypatch.setattr(writers, "PATIENCE", 0.05)
    failed: list[str] = []
    writer = Writer("test", lambda what, error: failed.append(what))
    hangs = threading.Event()
    assert writer.submit("one", lambda: bool(hangs.wait()) and None, 8)
    assert not writer.submit("two", lambda: None, 8)
    assert writer.submit("the end", lambda: None)
    assert failed == ["two"]
    hangs.set()
    writer.settle()
    assert writer.submit("three", lambda: None, 8)


def test_its_thread_is_not_behind_the_one_that_waits_for_the_interpreter() -> None:
    own: list[int] = []
    writer = Writer("test", lambda what, error: None)
    writer.submit("one", lambda: own.append(os.getpriority(os.PRIO_PROCESS, 0)))
    writer.settle()
    assert own == [os.getpriority(os.PRIO_PROCESS, 0)]
