"""The writer: in order, in its own thread, and its failures are told and not raised."""

from __future__ import annotations

import threading

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
