"""Content of the report, before it is laid out: summary and scores as sentences and rows.

"Not recovered" is never "safe": every sentence that reports a failure to reconstruct says whose.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsim.campaign.jobs import Job
from fedsim.core.errors import FedsimError
from fedsim.core.knowledge import FIELDS, THREATS, granted_by
from fedsim.core.metrics import METRICS
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec, TrainSpec
from fedsim.report.formats import count
from fedsim.report.headline import strength
from fedsim.scoring.scores import results_of
from fedsim.scoring.statistics import count_pictures

CURVES = ["round", "train_loss", "test_loss", "test_accuracy"]
TROUBLES_SHOWN = 50


def ranked(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The strongest first, the baseline last."""
    return [_worded(entry) for entry in sorted(verdicts, key=strength)]


def _worded(entry: dict[str, Any]) -> dict[str, Any]:
    """A summary entry; one without a result adds that this says nothing about safety."""
    if entry["verdict"] != "NO RESULT":
        return entry
    words = entry.get("words") or f"{entry['attack']} gave no result"
    return {**entry, "words": f"{_sentence(words)}. This says nothing about safety."}


def _sentence(reason: str) -> str:
    return reason.strip().rstrip(".")


def facts(spec: Spec, summary: dict[str, Any], scores: pd.DataFrame) -> list[tuple[str, str]]:
    """What was audited, at a glance."""
    train = spec.train
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
        *_training_facts(train),
        ("Defenses", "; ".join(_component(d) for d in spec.defenses) or "none"),
        *_active_facts(spec),
        ("Attacker", f"{threat.letter}, {threat.name}"),
        ("Attacked", _attacked(summary, scores)),
    ]


def _attacked(summary: dict[str, Any], scores: pd.DataFrame) -> str:
    """How many updates, and pictures behind them, or made of them where nobody knows those."""
    made = [entry for entry in summary["verdicts"] if entry.get("made")]
    if scores.empty and made:
        most = max(made, key=lambda entry: int(entry["victims"]))
        return f"{count(most['victims'], 'update')}, {count(most['made'], 'picture')} made of them"
    victims = len(scores.drop_duplicates(["round", "client"]))
    return f"{count(victims, 'update')}, {_images(scores)}"


def _training_facts(train: TrainSpec) -> list[tuple[str, str]]:
    """How clients train, where they do more than plain steps on plain pictures."""
    plain, words = TrainSpec(), []
    if train.augment:
        names = ", ".join(one.name for one in train.augment)
        words.append(f"pictures augmented ({names})")
    if train.loss.label_smoothing:
        words.append(f"labels smoothed by {train.loss.label_smoothing:g}")
    if train.loss.weights is not None:
        own = train.loss.weights == "balanced"
        words.append("classes weighted" + (" by each client's own counts" if own else ""))
    if train.accumulate > 1:
        words.append(f"{train.accumulate} batches a step")
    if train.proximal:
        words.append(f"FedProx mu {train.proximal:g}")
    for name, schedule in (("step", train.schedule), ("round", train.round_schedule)):
        if schedule != plain.schedule:
            words.append(f"learning rate by {name}: {schedule.name}")
    if train.precision != plain.precision:
        words.append(f"computed in {train.precision}")
    if train.upload_dtype != plain.upload_dtype:
        words.append(f"uploaded in {train.upload_dtype}")
    return [("Training", "; ".join(words))] if words else []


def _active_facts(spec: Spec) -> list[tuple[str, str]]:
    """What an active server does, and what the clients check, where there is either."""
    found = []
    if spec.server.manoeuvre is not None:
        replies = {"discard": "replies discarded", "include": "replies in the model"}
        outcome = replies.get(spec.server.aggregate, "each round followed by an honest copy")
        found.append(("Server", f"{_component(spec.server.manoeuvre)}, {outcome}"))
    if spec.guards:
        found.append(("Guards", "; ".join(_component(guard) for guard in spec.guards)))
    return found


def untried(spec: Spec) -> str | None:
    """What an audit of a server that changes nothing does not say; None where it did."""
    if spec.server.manoeuvre is not None:
        return None
    return (
        f"An active server was not tried: under threat {spec.threat.model} everybody is sent the "
        f"same honest weights. A server that chooses them takes exact pictures out of large "
        f"batches and through secure aggregation."
    )


def server(summary: dict[str, Any]) -> dict[str, Any] | None:
    """What the server did, with the accuracy of its model as a list of rounds; None for an honest
    one."""
    account = summary.get("server")
    if not account:
        return None
    accuracy = account.get("accuracy", {})
    rows = [
        {"round": int(r), "accuracy": value, "tampered": int(r) in account["tampered"]}
        for r, value in accuracy.items()
    ]
    return {**account, "curve": sorted(rows, key=lambda row: row["round"])}


def _component(component: Component) -> str:
    options = ", ".join(f"{key} {value}" for key, value in component.params.items())
    return f"{component.name} ({options})" if options else component.name


def _images(scores: pd.DataFrame) -> str:
    return count(count_pictures(scores), "picture")


def threat_model(spec: Spec, summary: dict[str, Any]) -> dict[str, Any]:
    """Letter, name and words; what is granted, and which attack read it."""
    threat = THREATS[summary["threat"]]
    granted = granted_by(spec.threat)
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


def identification(summary: dict[str, Any]) -> dict[str, Any] | None:
    """What a rate of identification is to be read against; None where there was no gallery."""
    entries = [entry.get("identification") for entry in summary["verdicts"]]
    return next((entry for entry in entries if entry), None)


EXPOSED_SHOWN = 12


def exposed(summary: dict[str, Any]) -> dict[str, Any]:
    """The attacked updates, the most exposed first, and how many more there are."""
    ranked = summary.get("population", [])
    return {"rows": ranked[:EXPOSED_SHOWN], "more": max(0, len(ranked) - EXPOSED_SHOWN)}


def privacy(summary: dict[str, Any]) -> list[str]:
    """The differential privacy that defenses promise after all rounds, a sentence each."""
    sentences = []
    for budget in summary.get("privacy", []):
        epsilon = budget["epsilon"]
        amount = "no epsilon at all, for want of noise"
        if epsilon is not None:
            amount = f"epsilon {epsilon:.3g} at delta {budget['delta']:.0e}"
        weak = " That is too much to mean anything." if epsilon is not None and epsilon > 50 else ""
        sentences.append(f"{budget['defense']} promises {budget['protects']} {amount}.{weak}")
    return sentences


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
    titles = {name: metric.title for name, metric in METRICS.items()}
    titles["identified"] = "Identification"
    reasons = summary.get("unavailable", {})
    return [(titles.get(m, m), _sentence(why) + ".") for m, why in reasons.items() if why]


def troubles(summary: dict[str, Any]) -> dict[str, Any]:
    """The first of the events and of the failed jobs; jobs that failed alike are listed once."""
    events = [
        {
            "kind": event["kind"].replace("_", " "),
            "message": event["message"],
            "where": ", ".join(f"{k} {event[k]}" for k in ("round", "client") if k in event),
        }
        for event in summary["events"]
    ]
    failed = _alike(summary["failed_jobs"])
    return {
        "events": events[:TROUBLES_SHOWN],
        "more_events": max(0, len(events) - TROUBLES_SHOWN),
        "failed": failed[:TROUBLES_SHOWN],
        "more_failed": max(0, len(failed) - TROUBLES_SHOWN),
    }


def _alike(failed: list[dict[str, str]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for job in failed:
        attack = job.get("attack") or job["job"].partition(" on ")[0]
        groups.setdefault((attack, job.get("kind", "failed"), job["reason"]), []).append(job["job"])
    return [
        {"attack": attack, "kind": kind, "reason": reason, "jobs": jobs}
        for (attack, kind, reason), jobs in groups.items()
    ]


Trace = list[tuple[int, float]]
NUMBER = re.compile(r"\d[\d.]*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Note:
    """What jobs of an attack noted; notes that differ only in their numbers are listed once."""

    words: str
    jobs: int
    finished: int
    alike: bool  # whether other jobs noted it with other numbers


def traces_and_notes(
    jobs: list[Job], seed: int
) -> tuple[dict[str, list[Trace]], dict[str, list[Note]]]:
    """What the finished jobs left beside their images, by attack."""
    traces: dict[str, list[Trace]] = {}
    by_attack: dict[str, dict[str, list[str]]] = {}
    finished: Counter[str] = Counter()
    for job, result in results_of(jobs, seed):
        finished[job.label] += 1
        if len(result.trace) > 1:
            traces.setdefault(job.label, []).append(result.trace)
        by_kind = {NUMBER.sub("#", note): note for note in result.notes}
        for kind, note in by_kind.items():
            by_attack.setdefault(job.label, {}).setdefault(kind, []).append(note)
    notes = {
        label: [Note(n[0], len(n), finished[label], len(set(n)) > 1) for n in kinds.values()]
        for label, kinds in by_attack.items()
    }
    return traces, notes


def rounds_of(run: Run) -> pd.DataFrame:
    """The rounds, with every column the curves need; empty where none can be read."""
    try:
        rounds = run.rounds
    except FedsimError:
        rounds = pd.DataFrame()
    return rounds.reindex(columns=CURVES).astype(float)
