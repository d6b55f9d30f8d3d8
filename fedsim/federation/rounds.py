"""Rounds: a row for every round done, and what went wrong in the one under way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedsim.core.wire import TEST_ACCURACY, TEST_LOSS, TRAIN_LOSS

Row = dict[str, Any]


class Event(NamedTuple):
    """Something that went wrong and was survived; with one client, where it is known."""

    kind: str
    client: int | None
    message: str


class RoundLog:
    """The table of rounds as it grows. What is noted of a round counts once the round is whole: one
    that is cut short is done again."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.events: list[Event] = []
        self._row: Row = {}
        self._since = time.perf_counter()

    @property
    def done(self) -> int:
        return len(self.rows)

    def begin(self) -> int:
        """Start a round; returns its number."""
        self._since = time.perf_counter()
        self.events = []
        return self.done + 1

    def note(self, kind: str, client: int | None, message: str) -> None:
        """Write down what went wrong; the same only once, however often it happens."""
        event = Event(kind, client, message)
        if event not in self.events:
            self.events.append(event)

    def trained(
        self, clients: int, failed: int, metrics: Mapping[str, Any] | None, received: int
    ) -> None:
        """The cohort has trained: what it uploaded is aggregated."""
        self._row = {
            "round": self.done + 1,
            "clients": clients,
            "failed": failed,
            TRAIN_LOSS: float(metrics[TRAIN_LOSS]) if metrics else None,
            "bytes": received,
        }

    def evaluated(self, metrics: Mapping[str, Any] | None) -> Row:
        """The round is over; returns its row."""
        for key in (TEST_LOSS, TEST_ACCURACY):
            self._row[key] = float(metrics[key]) if metrics else None
        self._row["seconds"] = round(time.perf_counter() - self._since, 3)
        self.rows.append(self._row)
        return self._row
