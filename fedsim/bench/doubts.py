"""Doubts: why a cell's numbers are no measure of its defense, marked wherever they are shown.

A low PSNR may be the defense's doing, or that of an attack which simulated another protocol, missed
victims or crashed. Only the first is what a benchmark is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

MIS_SPECIFIED, INCOMPLETE, CRASHED, BLIND = "MIS-SPECIFIED", "INCOMPLETE", "crashed", "blind"
REFUSED = "refused"
_MARKS = {
    MIS_SPECIFIED: (
        "†",
        "MIS-SPECIFIED: the clients did not follow the protocol announced, so a low number says "
        "nothing about the defense.",
    ),
    INCOMPLETE: (
        "‡",
        "INCOMPLETE: fewer victims or trials were scored than were asked for.",
    ),
    CRASHED: (
        "§",
        "Crashed: an attack crashed, hung or met a fault, so there is no number, or none of some "
        "seeds.",
    ),
    REFUSED: (
        "∥",
        "Refused: the clients' guards let nothing be uploaded, so there was nothing to attack.",
    ),
    BLIND: (
        "¶",
        "BASELINE: the attack never looked at an update, so its number is a guess.",
    ),
}


def doubt_of(entry: Mapping[str, Any], failed: Iterable[Mapping[str, str]] = ()) -> str:
    """What is wrong with the numbers of one attack in a summary, whatever its verdict; empty where
    nothing is. An attack that declined has found out that it does not apply: that is no doubt.
    Summaries of older versions tell it by their ``failed`` jobs."""
    if entry["verdict"] == "NO RESULT" and entry.get("refused") and not entry.get("victims_of"):
        return REFUSED
    if entry["verdict"] == "NO RESULT":
        kinds = {job.get("kind") for job in failed if job.get("attack") == entry["attack"]}
        return "" if entry.get("declined", kinds == {"declined"}) else CRASHED
    if entry.get("is_baseline", entry["verdict"] == "BASELINE"):
        return ""
    met = {
        MIS_SPECIFIED: not entry.get("canary", {}).get("ok", True),
        INCOMPLETE: bool(entry.get("lacking")),
        BLIND: not entry.get("looked", True),
    }
    return gathered(doubt for doubt, holds in met.items() if holds)


def gathered(doubts: Iterable[str]) -> str:
    """The doubts of several seeds or ways as one word list, each once, in a fixed order."""
    met = {part for doubt in doubts for part in str(doubt).split(", ")}
    return ", ".join(doubt for doubt in _MARKS if doubt in met)


def marks_of(doubts: str) -> str:
    """The marks that stand for doubts beside a number."""
    return "".join(_MARKS[doubt][0] for doubt in doubts.split(", ") if doubt in _MARKS)


def legend_of(table: pd.DataFrame) -> list[str]:
    """A line for each mark that the table has."""
    met = gathered(table["doubts"]).split(", ")
    return [f"{mark} {words}" for doubt, (mark, words) in _MARKS.items() if doubt in met]
