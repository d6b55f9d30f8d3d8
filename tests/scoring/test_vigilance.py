"""Vigilance: what an active server did, and what the clients noticed of it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from fedsim.scoring.vigilance import noticed, refused_in, server_account, words_at
from tests.conftest import small_spec

GUARD = "{name: 'tests.servers:Suspicious', score: 1.0, refuse: REFUSE}"
SERVER = "server={manoeuvre: {name: 'tests.servers:OwnHead'}, rounds: [2]}"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tampered round after an honest one, before a guard that always speaks up."""
    guards = f"guards=[{GUARD.replace('REFUSE', 'false')}]"
    spec = small_spec("threat=F", SERVER, guards, "train.evaluate=true")
    return audit(spec, tmp_path_factory.mktemp("watched") / "run")


def test_the_account_says_what_was_sent_and_what_it_cost(watched: Run) -> None:
    account = server_account(watched, watched.spec, watched.rounds)
    assert account is not None
    assert (account["manoeuvre"], account["tampered"]) == ("OwnHead", [2])
    assert account["words"].startswith("1 of 2 rounds were tampered with; their replies did not")
    assert [one["words"] for one in account["chosen"]] == ["a head", "a head"]
    assert list(account["accuracy"]) == ["1", "2"]
    assert watched.summary["server"] == account


def test_an_honest_server_has_no_account(small_run: Run) -> None:
    assert server_account(small_run, small_run.spec, small_run.rounds) is None
    assert noticed(small_run, small_run.spec) is None
    assert words_at(None, 1, 0) is None


def test_guards_are_counted_on_tampered_and_on_honest_weights(watched: Run) -> None:
    found = noticed(watched, watched.spec)
    assert found is not None
    (row,) = found["guards"]
    assert (row["noticed"], row["tampered"], row["false_alarms"], row["honest"]) == (2, 2, 2, 2)
    client = watched.spec.cohort(2)[0]
    assert words_at(found, 2, client) == "noticed: suspicious 1 (limit 0.5)"
    assert words_at(found, 7, client) == "what its guards found is not known"
    quiet = {"rows": [{**found["rows"][0], "fired": False, "round": 7, "client": 0}]}
    assert words_at(quiet, 7, 0) == "its guards noticed nothing"


def test_the_report_tells_it(watched: Run) -> None:
    page = watched.report.read_text()
    assert "What the server did, and what the clients noticed" in page
    assert "noticed: suspicious 1 (limit 0.5)" in page
    assert "An active server was not tried" not in page


def test_a_report_of_a_passive_server_says_that_an_active_one_was_not_tried(small_run: Run) -> None:
    assert "An active server was not tried: under threat C" in small_run.report.read_text()


def test_whoever_refuses_is_nobodys_missing_victim(tmp_path: Path) -> None:
    guards = f"guards=[{GUARD.replace('REFUSE', 'true')}]"
    run = audit(small_spec(guards), tmp_path / "run")
    assert len(refused_in(run)) == 4
    entry = run.summary["verdicts"][0]
    assert (entry["verdict"], entry["victims_of"], entry["refused"]) == ("NO RESULT", 0, 4)
    assert "the guards of all 4 victims kept them from uploading" in entry["words"]
    assert isinstance(run.scores, pd.DataFrame)
    assert {event["kind"] for event in run.events()} == {"client_refused"}
    assert run.scores.empty
