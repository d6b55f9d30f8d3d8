"""Rounds: the table grows by whole rounds."""

from __future__ import annotations

from fedsim.core.run import ROUND_COLUMNS
from fedsim.federation.rounds import RoundLog


def test_a_round_is_counted_when_it_was_evaluated() -> None:
    log = RoundLog([])
    assert log.begin() == 1
    log.trained(3, 1, {"train_loss": 2.0}, received=10)
    assert log.done == 0
    row = log.evaluated({"test_loss": 1.0, "test_accuracy": 0.5})
    assert log.rows == [row]
    assert row.keys() == set(ROUND_COLUMNS)
    assert (row["clients"], row["failed"], row["test_accuracy"]) == (3, 1, 0.5)
    assert log.begin() == 2


def test_a_round_without_an_answer_has_a_row_without_numbers() -> None:
    log = RoundLog([])
    log.begin()
    log.trained(0, 4, None, received=0)
    row = log.evaluated(None)
    assert row["train_loss"] is row["test_loss"] is row["test_accuracy"] is None


def test_what_is_noted_of_a_round_that_is_cut_short_is_forgotten() -> None:
    log = RoundLog([])
    log.begin()
    log.note("client_failed", 2, "client 2 failed")
    kept = log.events
    log.begin()
    assert log.events == []
    assert [event.client for event in kept] == [2]  # a commit under way still has them


def test_what_happens_a_thousand_times_in_a_round_is_noted_once() -> None:
    log = RoundLog([])
    log.begin()
    for _ in range(1000):
        log.note("update_rejected", None, "a node that is no client sent a reply")
    log.note("update_rejected", 2, "a node that is no client sent a reply")
    assert [event.client for event in log.events] == [None, 2]
