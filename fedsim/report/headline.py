"""Headline of a report: the strongest thing that the run found, as a sentence.

"Not recovered" is never "safe": every sentence that reports a failure to reconstruct says whose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsim.core.attack import BASELINE
from fedsim.report.formats import decibel
from fedsim.scoring.recovery import ABOVE_BASELINE_DB, RECOVERED_DB
from fedsim.scoring.wording import closest, stand_out_words

# What a reader must know first comes first. A mis-specified or incomplete attack outranks a failed
# one: it is the reason not to believe the failure. So does one that crashed on all its victims; one
# that declined them comes last (`rank_of`).
RANK = ["LEAKS", "PARTIAL", "MIS-SPECIFIED", "INCOMPLETE"]
RANK += ["NOT SCORED", "NOT RECOVERED", "NO RESULT"]


@dataclass(frozen=True)
class Finding:
    """The strongest thing the run found, and the attack that found it."""

    verdict: str
    sentence: str
    detail: str
    attack: str | None


def strongest(summary: dict[str, Any]) -> Finding:
    """The verdict that comes first; of equals, the attack with the closest picture."""
    entries = [
        entry
        for entry in summary["verdicts"]
        if entry["attack"] != baseline_of(summary) and entry["verdict"] != "BASELINE"
    ]
    if not entries:
        return Finding(
            "NO RESULT",
            "No conclusion: no attack that looks at an update was run.",
            "A guess that never sees an update says nothing about what one gives away.",
            None,
        )
    entry = min(entries, key=strength)
    if entry["verdict"] == "NO RESULT":
        return _nothing(entry, entries)
    if entry["verdict"] == "NOT SCORED":
        return Finding(
            "NOT SCORED",
            "Reconstructions without scores: "
            + (
                "no witness tells the truth."
                if entry.get("unbound")
                else "no client had a witness."
            ),
            f"Below is what the attacks made of the updates that the server received. Nobody here "
            f"knows the clients' pictures, so nothing says how close they are: this is neither a "
            f"leak that is shown nor a sign of safety. {entry.get('words', '')}",
            None,
        )
    sentence, detail = _told(entry, summary["threat"])
    return Finding(entry["verdict"], sentence, detail, entry["attack"])


def _nothing(entry: dict[str, Any], entries: list[dict[str, Any]]) -> Finding:
    """An attack without a result is the finding: the others found nothing, or there are none."""
    if entry.get("refused") and not entry.get("victims_of"):
        return Finding(
            "NO RESULT",
            f"Nothing was uploaded: the guards of all {entry['refused']} victims refused.",
            "They did not like the weights that they were sent, so there was nothing to attack. "
            "What a gentler server would have got past them, this run does not say.",
            None,
        )
    sentence = "No conclusion: no attack produced a result."
    detail = "The reasons are below."
    if any(other["verdict"] != "NO RESULT" for other in entries):
        sentence = f"No conclusion: {entry['attack']} produced no result."
        why = entry.get("words", "").strip().rstrip(".")
        detail = (
            f"{why}. The other attacks did not recover a picture, "
            f"which says nothing about what this one would have found."
        )
    safe = "This says nothing about whether the clients' pictures can be recovered."
    return Finding("NO RESULT", sentence, f"{detail} {safe}", None)


def baseline_of(summary: dict[str, Any]) -> str | None:
    """What the baseline is called in a run; summaries of older versions do not tell."""
    name: str | None = summary.get("baseline", BASELINE)
    return name


def _told(entry: dict[str, Any], threat: str) -> tuple[str, str]:
    """A finding as a sentence, and the details that a reader must know."""
    hit, of = entry["recovered"], entry["pictures"]
    name, nearest = entry["attack"], closest(entry, decibel)
    stand_out = entry.get("stand_out")
    extent = f"{hit} of {of}" if hit < of else f"all {of}"
    pictures = f"{extent} attacked pictures" if of > 1 else "the attacked picture"
    return {
        "LEAKS": (
            f"The attacker reconstructed {pictures}.",
            f"By {name}, with the knowledge of threat model {threat}: at {RECOVERED_DB:.0f} dB or "
            f"more, and at least {ABOVE_BASELINE_DB:.0f} dB closer than a guess that never sees "
            f"an update and than any flat colour. The closest one: {nearest}.",
        ),
        "PARTIAL": (
            f"The attacker learned more than a guess: {stand_out_words(stand_out)}."
            if stand_out
            else "The attacker learned more than a guess, but no clear picture came back.",
            f"The closest reconstruction, by {name}: {nearest}. A stronger attack or a larger "
            f"budget may do better.",
        ),
        "NOT RECOVERED": (
            "The attacks in this run did not recover a picture.",
            f"This is a statement about these attacks at this budget, not about the clients' "
            f"safety: a stronger attack may recover what these did not. The closest "
            f"reconstruction, by {name}: {nearest}.",
        ),
        "INCOMPLETE": (
            "No conclusion: less was attacked than was asked for.",
            f"By {name}, {entry.get('lacking')}. On the rest no clear picture came back, the "
            f"closest one at {nearest}; that says nothing about what is missing. The reasons are "
            f"below.",
        ),
        "MIS-SPECIFIED": (
            "No conclusion: the attacks did not simulate what the clients did.",
            "The clients' true batches, replayed as the attacks simulate them, do not give the "
            "updates observed. A low score below says nothing about safety.",
        ),
    }[entry["verdict"]]


def strength(entry: dict[str, Any]) -> tuple[int, float, float]:
    """By which entries are sorted: the least is the strongest."""
    psnr = entry.get("metrics", {}).get("psnr", {})
    rank = rank_of(entry["verdict"], entry.get("declined", True))
    return rank, -(psnr.get("worst_case") or 0.0), -(psnr.get("mean") or 0.0)


def rank_of(verdict: str, declined: bool) -> int:
    """Where a verdict ranks. An attack that gave no result because it declined has found out that
    it does not apply; any other is not done, and ranks with what is incomplete. Summaries of older
    versions do not tell: there ``declined`` is taken for granted."""
    if verdict == "NO RESULT" and not declined:
        return RANK.index("INCOMPLETE")
    return RANK.index(verdict) if verdict in RANK else len(RANK)
