"""What the report says, before it is laid out: summary and scores turned into sentences and rows.

"Not recovered" is never "safe": every sentence that reports a failure to reconstruct says whose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsim.core.attack import Reconstruction
from fedsim.core.errors import RunError
from fedsim.core.knowledge import FIELDS, THREATS
from fedsim.core.spec import Component, Spec
from fedsim.core.store import Run
from fedsim.report.words import count, decibel
from fedsim.verdict import ABOVE_BASELINE_DB, BASELINE, KEYS, RECOVERED_DB
from fedsim.workers import Job

# What a reader must know first comes first. A mis-specified attack outranks a failed one: it is
# the reason not to believe the failure.
RANK = ["LEAKS", "PARTIAL", "MIS-SPECIFIED", "NOT RECOVERED", "NO RESULT"]
ROUND_COLUMNS = ["round", "train_loss", "test_loss", "test_accuracy"]
TROUBLES_SHOWN = 50


@dataclass(frozen=True)
class Finding:
    """The strongest thing the run found, and the attack that found it."""

    verdict: str
    sentence: str
    detail: str
    attack: str | None


def strongest(summary: dict[str, Any], scores: pd.DataFrame) -> Finding:
    """The verdict that comes first; of equals, the attack with the closest picture."""
    entries = [entry for entry in summary["verdicts"] if entry["attack"] != BASELINE]
    if not entries:
        return Finding(
            "NO RESULT",
            "No conclusion: no attack was run.",
            "The baseline never sees an update, so it says nothing about what an update gives "
            "away.",
            None,
        )
    entry = min(entries, key=_strength)
    verdict, name = entry["verdict"], entry["attack"]
    if verdict == "NO RESULT":
        return Finding(
            verdict,
            "No conclusion: no attack produced a result.",
            "Every attack job failed; the reasons are below. This says nothing about whether "
            "the clients' pictures can be recovered.",
            None,
        )
    closest = decibel(entry["metrics"]["psnr"]["worst_case"])
    if verdict == "LEAKS":
        hit, of = recovered_images(scores, name)
        if hit == of:
            sentence = (
                "The attacker reconstructed the attacked picture."
                if of == 1
                else f"The attacker reconstructed all {of} attacked pictures."
            )
        else:
            sentence = f"The attacker reconstructed {hit} of {of} attacked pictures."
        detail = (
            f"By {name}, with the knowledge of threat model {summary['threat']}: at "
            f"{RECOVERED_DB:.0f} dB or more, and at least {ABOVE_BASELINE_DB:.0f} dB closer than "
            f"a guess that never sees an update. The closest one: {closest}."
        )
    elif verdict == "PARTIAL":
        sentence = "The attacker learned more than a guess, but no clear picture came back."
        detail = (
            f"The closest reconstruction, by {name}: {closest}. A stronger attack or a larger "
            f"budget may do better."
        )
    elif verdict == "NOT RECOVERED":
        sentence = "The attacks in this run did not recover a picture."
        detail = (
            f"This is a statement about these attacks at this budget, not about the clients' "
            f"safety: a stronger attack may recover what these did not. The closest "
            f"reconstruction, by {name}: {closest}."
        )
    else:
        sentence = "No conclusion: the attacks were aimed at a protocol the clients did not follow."
        detail = (
            "The clients' true batches, replayed as the attacks simulate them, do not give the "
            "updates observed. Low scores below say nothing about safety."
        )
    return Finding(verdict, sentence, detail, name)


def _strength(entry: dict[str, Any]) -> tuple[int, float, float]:
    psnr = entry.get("metrics", {}).get("psnr", {})
    rank = RANK.index(entry["verdict"]) if entry["verdict"] in RANK else len(RANK)
    return rank, -(psnr.get("worst_case") or 0.0), -(psnr.get("mean") or 0.0)


def recovered_images(scores: pd.DataFrame, attack: str) -> tuple[int, int]:
    """How many distinct images an attack recovered in any trial, by the rule for LEAKS."""
    own = scores[scores["attack"] == attack].groupby(KEYS)["psnr"].max()
    base = scores[scores["attack"] == BASELINE].groupby(KEYS)["psnr"].max()
    gain = own - base.reindex(own.index)
    hit = (own >= RECOVERED_DB) & ((gain >= ABOVE_BASELINE_DB) | gain.isna())
    return int(hit.sum()), len(own)


def attack_line(entry: dict[str, Any]) -> dict[str, Any]:
    """A summary entry; one without a result also says what that does not mean."""
    if entry["verdict"] != "NO RESULT":
        return entry
    words = entry.get("words") or f"{entry['attack']} gave no result"
    return {**entry, "words": f"{_sentence(words)}. This says nothing about safety."}


def _sentence(reason: str) -> str:
    return reason.strip().rstrip(".")


def facts(spec: Spec, summary: dict[str, Any], scores: pd.DataFrame) -> list[tuple[str, str]]:
    """What was audited, at a glance."""
    train, victims = spec.train, len(scores.drop_duplicates(["round", "client"]))
    steps = (
        count(train.local_epochs, "local epoch")
        if train.local_epochs
        else count(train.local_steps or 1, "local step")
    )
    threat = THREATS[summary["threat"]]
    return [
        ("Model", spec.model.name + (", pretrained" if spec.model.pretrained else "")),
        ("Data", f"{spec.data.name}, {spec.data.image_size} px"),
        (
            "Federation",
            f"{count(spec.data.clients, 'client')}, {spec.cohort_size} a round, "
            f"{count(train.rounds, 'round')}",
        ),
        ("Upload", f"{train.upload} of {steps}, batch size {train.batch_size}"),
        ("Defenses", "; ".join(_component(d) for d in spec.defenses) or "none"),
        ("Attacker", f"{threat.letter}, {threat.name}"),
        ("Attacked", f"{count(victims, 'update')}, {_images(scores)}"),
    ]


def _component(component: Component) -> str:
    options = ", ".join(f"{key} {value}" for key, value in component.params.items())
    return f"{component.name} ({options})" if options else component.name


def _images(scores: pd.DataFrame) -> str:
    return count(len(scores.drop_duplicates(KEYS)), "picture")


def threat_model(spec: Spec, summary: dict[str, Any]) -> dict[str, Any]:
    """Letter, name and words; what is granted, and which attack read it."""
    threat = THREATS[summary["threat"]]
    granted = threat.grants | ({"oracle_labels"} if summary["oracle_labels"] else set())
    readers = {entry["attack"]: entry.get("ledger", []) for entry in summary["verdicts"]}
    rows = [
        {
            "field": field,
            "words": words,
            "readers": [name for name, read in readers.items() if field in read],
        }
        for field, words in FIELDS.items()
        if field in granted
    ]
    return {
        "letter": threat.letter,
        "name": threat.name,
        "words": threat.words,
        "rows": rows,
        "withheld": [words for field, words in FIELDS.items() if field not in granted],
        "ledgers": readers,
        "surrogate": spec.threat.surrogate,
    }


def canary(summary: dict[str, Any], scores: pd.DataFrame) -> dict[str, Any] | None:
    """The replay of all scored updates; None where nothing was scored."""
    checks = [entry["canary"] for entry in summary["verdicts"] if "canary" in entry]
    if not checks:
        return None
    tolerance = checks[0]["tolerance"]
    errors = scores.drop_duplicates(["round", "client"])["canary"].astype(float)
    return {
        "ok": all(check["ok"] for check in checks),
        "worst": max((c["worst"] for c in checks if c["worst"] is not None), default=None),
        "tolerance": tolerance,
        "victims": len(errors),
        "failed": int((~(errors <= tolerance)).sum()),
        "unknown": int(errors.isna().sum()),
    }


def unavailable(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Why columns are empty: metric and reason."""
    names = {"lpips": "LPIPS", "identified": "Identification"}
    reasons = summary.get("unavailable", {})
    return [(names.get(m, m), _sentence(why) + ".") for m, why in reasons.items() if why]


def troubles(summary: dict[str, Any]) -> dict[str, Any]:
    """Events and failed jobs, the first of each."""
    events = [
        {
            "kind": event["kind"].replace("_", " "),
            "message": event["message"],
            "where": ", ".join(f"{k} {event[k]}" for k in ("round", "client") if k in event),
        }
        for event in summary["events"]
    ]
    failed = summary["failed_jobs"]
    return {
        "events": events[:TROUBLES_SHOWN],
        "more_events": max(0, len(events) - TROUBLES_SHOWN),
        "failed": failed[:TROUBLES_SHOWN],
        "more_failed": max(0, len(failed) - TROUBLES_SHOWN),
    }


Trace = list[tuple[int, float]]
Note = tuple[str, int, int]  # words, jobs that carry them, finished jobs


def traces_and_notes(jobs: list[Job]) -> tuple[dict[str, list[Trace]], dict[str, list[Note]]]:
    """What the finished jobs left beside their images, attack by attack."""
    traces: dict[str, list[Trace]] = {}
    counts: dict[str, Counter[str]] = {}
    finished: Counter[str] = Counter()
    for job in jobs:
        if not job.result.is_file():
            continue
        result = Reconstruction.load(job.result)
        finished[job.label] += 1
        if len(result.trace) > 1:
            traces.setdefault(job.label, []).append(result.trace)
        counts.setdefault(job.label, Counter()).update(set(result.notes))
    notes = {
        label: [(words, times, finished[label]) for words, times in own.most_common()]
        for label, own in counts.items()
        if own
    }
    return traces, notes


def rounds_of(run: Run) -> pd.DataFrame:
    """The rounds, with every column the curves need; empty where none was recorded."""
    try:
        rounds = run.rounds
    except RunError:
        rounds = pd.DataFrame()
    return rounds.reindex(columns=ROUND_COLUMNS).astype(float)
