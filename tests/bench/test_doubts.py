"""Doubts: a number that is no measure of a defense carries a mark that says why."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from fedsim.bench.doubts import doubt_of, gathered, legend_of, marks_of


def entry(verdict: str = "NOT RECOVERED", **more: Any) -> dict[str, Any]:
    return {"attack": "a", "verdict": verdict, **more}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (entry(), ""),
        (entry("LEAKS", canary={"ok": True}, lacking="", looked=True), ""),
        (entry("LEAKS", canary={"ok": False}), "MIS-SPECIFIED"),
        (entry(lacking="one victim is missing"), "INCOMPLETE"),
        (entry("BASELINE", is_baseline=False, looked=False), "blind"),
        (entry("BASELINE", is_baseline=True, looked=False), ""),
        (entry("BASELINE"), ""),  # as older summaries have it
        (
            entry(looked=False, lacking="one", canary={"ok": False}),
            "MIS-SPECIFIED, INCOMPLETE, blind",
        ),
        (entry("NO RESULT", declined=True), ""),
        (entry("NO RESULT", declined=False), "crashed"),
        (entry("NO RESULT", declined=False, refused=4, victims_of=0), "refused"),
        (entry("NO RESULT", declined=False, refused=1, victims_of=3), "crashed"),
    ],
)
def test_what_is_wrong_with_a_number_is_told_whatever_its_verdict(
    found: dict[str, Any], expected: str
) -> None:
    assert doubt_of(found) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(["declined"], ""), (["declined", "crashed"], "crashed"), ([], "crashed")],
)
def test_an_older_summary_tells_by_its_failed_jobs_who_declined(
    kinds: list[str], expected: str
) -> None:
    jobs = [{"attack": "a", "kind": kind} for kind in kinds]
    other = {"attack": "b", "kind": "crashed"}
    assert doubt_of(entry("NO RESULT"), [*jobs, other]) == expected


def test_doubts_of_several_seeds_are_told_once_and_in_one_order() -> None:
    doubts = ["blind, INCOMPLETE", "", "MIS-SPECIFIED", "INCOMPLETE"]
    assert gathered(doubts) == "MIS-SPECIFIED, INCOMPLETE, blind"
    assert marks_of(gathered(doubts)) == "†‡¶"
    assert (gathered([]), marks_of("")) == ("", "")


def test_the_legend_explains_the_marks_that_are_there_and_no_others() -> None:
    table = pd.DataFrame({"doubts": ["", "crashed", "crashed, blind"]})
    first, second = legend_of(table)
    assert first.startswith("§ Crashed: ")
    assert second.startswith("¶ BASELINE: ")
    assert legend_of(pd.DataFrame({"doubts": ["", ""]})) == []
