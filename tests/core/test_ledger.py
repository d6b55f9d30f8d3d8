"""Ledgers: one for an attack, its copies and its children."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest

from fedsim.core.errors import NotGranted
from fedsim.core.ledger import Ledger


def test_a_name_is_written_down_once_and_in_order() -> None:
    ledger = Ledger(["weights"])
    for name in ("update", "weights", "update"):
        ledger.note(name)
    assert list(ledger) == ["weights", "update"]
    assert "update" in ledger
    assert "upd" not in ledger


def test_a_copy_is_the_ledger_itself() -> None:
    ledger = Ledger()
    for twin in (copy.copy(ledger), copy.deepcopy({"kept": ledger})["kept"]):
        assert twin is ledger


def test_what_a_forked_process_reads_is_written_down_here() -> None:
    ledger = Ledger(["weights"])
    child = multiprocessing.get_context("fork").Process(target=ledger.note, args=("update",))
    child.start()
    child.join()
    assert list(ledger) == ["weights", "update"]


def test_a_ledger_is_sent_to_nobody() -> None:
    with pytest.raises(NotGranted, match="sent its View to another process"):
        pickle.dumps(Ledger())
