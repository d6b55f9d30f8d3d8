"""The roster: who says who it is, who cannot, and who lies."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from flwr.app import ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.app.error import Error

from fedsim.core import wire
from fedsim.core.errors import RunError
from fedsim.federation.grids import StreamingGrid
from fedsim.federation.pace import FLOOR, Pace
from fedsim.federation.roster import LATE_SECONDS, Roster
from tests.canned import SILENT, Answer, CannedGrid, canned_plan

HOUR = 3600.0
Introduction = Callable[[RecordDict], Answer] | None  # None: silence


class Met:
    """A roster, and what it was told and asked."""

    def __init__(
        self, *introductions: Callable[[RecordDict], Answer], connected: int | None = None
    ):
        self.grid = CannedGrid(len(introductions), canned_plan())
        self.grid.nodes = self.grid.nodes[:connected]
        for client, introduction in enumerate(introductions):
            self.says(client, introduction)
        pace = Pace(10, FLOOR, self.grid.clock)
        self.streaming = StreamingGrid(self.grid, threading.Event(), pace)
        self.told: list[str] = []
        self.roster = Roster(len(introductions), lambda kind, words: self.told.append(words))

    def says(self, client: int, introduction: Introduction) -> None:
        self.grid.delays[client, MessageType.QUERY] = 1.0 if introduction else SILENT
        self.grid.answers[client, MessageType.QUERY] = introduction or honest

    def meet(self) -> dict[int, int]:
        self.roster.meet(self.streaming, HOUR)
        return self.roster.client_of

    def look_again(self, *wanted: int) -> dict[int, int]:
        self.roster.look_again(self.streaming, wanted, HOUR)
        return self.roster.client_of


def honest(content: RecordDict) -> Answer:
    return content


silent = None


def claims(client: object) -> Introduction:
    metrics = MetricRecord({wire.PARTITION: client})  # type: ignore[dict-item]
    return lambda content: RecordDict({"metrics": metrics})


def test_every_node_is_asked_which_client_it_is() -> None:
    met = Met(claims(2), claims(0), claims(1))
    assert met.meet() == {1: 2, 2: 0, 3: 1}
    assert met.told == []
    assert 1 in met.roster
    assert 3 not in met.roster


@pytest.mark.parametrize(
    ("introduction", "expected"),
    [
        (claims(7), "client 7, and there are clients 0 to 2 only"),
        (claims(-1), "client -1, and there are"),
        (claims(0.5), "does not say which client"),
        (claims([1]), "does not say which client"),
        (claims(10**30), "does not say which client"),
        (lambda content: RecordDict(), "does not say which client"),
        (lambda content: RecordDict({"metrics": ConfigRecord({"a": "b"})}), "does not say which"),
        (
            lambda content: Error(2, "x\n\x1b[2JImportError: no torch"),
            "start: [2JImportError: no torch",
        ),
        (silent, "did not say in time"),
    ],
)
def test_a_node_that_fails_or_lies_is_left_out_and_told_in_one_sentence(
    introduction: Introduction, expected: str
) -> None:
    met = Met(honest, introduction, honest)
    assert met.meet() == {1: 0, 3: 2}
    first, missing = met.told
    assert expected in first
    assert first.isprintable()
    assert missing == "client 1 is not there; the federation goes on without."


def test_nodes_that_say_they_are_the_same_client_are_both_left_out() -> None:
    met = Met(honest, claims(0), honest)
    assert met.meet() == {3: 2}
    assert "two nodes say they are client 0; correct one's partition-id." in met.told
    assert met.told[-1] == "2 clients are not there; the federation goes on without."


def test_where_nobody_is_left_the_run_ends_with_the_first_reason() -> None:
    with pytest.raises(RunError, match="two nodes say they are client 1"):
        Met(claims(1), claims(1)).meet()
    with pytest.raises(RunError, match="did not say in time"):
        Met(silent).meet()


def test_a_silent_node_costs_a_part_of_the_timeout_at_identification() -> None:
    met = Met(honest, silent, honest)
    met.meet()
    assert FLOOR <= met.grid.clock.now < FLOOR + 10


def test_a_node_that_does_not_connect_is_waited_for_a_while() -> None:
    met = Met(honest, honest, honest, connected=2)
    assert met.meet() == {1: 0, 2: 1}
    assert LATE_SECONDS <= met.grid.clock.now < LATE_SECONDS + 10


def test_where_none_connects_the_timeout_is_waited_for() -> None:
    met = Met(honest, honest, connected=0)
    with pytest.raises(RunError, match="none of 2 clients connected in 3600 s"):
        met.meet()


def test_a_client_that_comes_late_is_found_when_it_is_wanted() -> None:
    met = Met(honest, silent, honest)
    met.meet()
    met.says(1, honest)
    asked = len(met.grid.asked)
    assert 2 not in met.look_again(0, 2), "nobody who is wanted is missing"
    assert len(met.grid.asked) == asked
    assert met.look_again(0, 1) == {1: 0, 3: 2, 2: 1}


def test_a_node_without_a_place_does_not_hold_a_round_up() -> None:
    met = Met(honest, silent, honest)
    met.meet()
    began = met.grid.clock.now
    assert 2 not in met.look_again(1)
    assert met.grid.clock.now - began < 15


def test_who_is_on_the_roster_keeps_its_place_from_newcomers() -> None:
    met = Met(honest, silent, honest)
    met.meet()
    met.says(1, claims(0))
    assert met.look_again(1) == {1: 0, 3: 2}
    assert met.told[-1] == "two nodes say they are client 0; correct one's partition-id."
