"""Status: how far a run got, told by its files alone.

planned   a spec and nothing else
running   rounds or jobs are done, others are missing, and files changed of late
stopped   the same, but nothing was written for a while: stopped, or in one very long job
trained   every round is done and no attack was run (`fedsim run`)
finished  there is a summary
damaged   its spec or its summary cannot be read
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.campaign.jobs import SPARED
from fedsim.campaign.plan import labelled_attacks, roles, trials_of, victims
from fedsim.core.documents import read_yaml
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import LINE_END, parse_json
from fedsim.core.run import ROUND_COLUMNS, list_lessons, paths, result_name
from fedsim.core.run.record import sheet_is_broken
from fedsim.core.spec import Spec, load_spec
from fedsim.report.formats import count
from fedsim.report.headline import baseline_of, rank_of
from fedsim.viewer.files import Files, exists, inside, reason
from fedsim.viewer.run_index import Place

QUIET_SECONDS = 300.0
SETTLED_SECONDS = 15.0  # between the last round and the first attack of an audit
MOST_PLANNED = 2_000_000  # jobs; counting more would stop the viewer
EVENTS_SHOWN, FAILURES_SHOWN = 12, 6


@dataclass(frozen=True)
class Planned:
    """A spec, and the names of the results that each of its attacks is to leave."""

    spec: Spec
    results: dict[str, frozenset[str]]

    @classmethod
    def parse(cls, content: bytes) -> Planned:
        if sheet_is_broken(content):
            raise RunError(f"{paths.SPEC} is damaged: its seal is broken.")
        parsed = read_yaml(content.decode(), paths.SPEC)
        if not isinstance(parsed, dict):
            raise RunError(f"{paths.SPEC} is empty or no spec.")
        spec = load_spec(parsed)
        own = without_strangers(spec)
        if max(spec.train.rounds, spec.data.clients, spec.audit.trials) > MOST_PLANNED or (
            spec.train.rounds * spec.cohort_size * spec.audit.trials * len(labelled_attacks(own))
            > MOST_PLANNED
        ):
            raise RunError(f"{paths.SPEC} plans more jobs than can be counted here.")
        chosen, played = victims(spec), roles(own)
        results: dict[str, frozenset[str]] = {}
        for label, component in labelled_attacks(own):
            if label in played and played[label].sample:  # tried once, on the first victim
                results[label] = frozenset({result_name(*min(chosen), 0)})
                continue
            trials = range(trials_of(component, spec))
            results[label] = frozenset(result_name(*v, trial) for v in chosen for trial in trials)
        return cls(spec, results)


def without_strangers(spec: Spec) -> Spec:
    """The spec without defenses by import path, which a suite would ask what counters them: a page
    imports nothing that a spec names."""
    ours = [component for component in spec.defenses if ":" not in component.name]
    return spec.model_copy(update={"defenses": ours})


@dataclass(frozen=True)
class AttackProgress:
    """The jobs of one attack."""

    attack: str
    done: int
    failed: int
    begun: int
    total: int


@dataclass(frozen=True)
class Outcome:
    """What the summary says of one attack; what is not a number is None."""

    attack: str
    verdict: str
    words: str
    images: int
    victims: int  # that share no picture with one another
    metrics: dict[str, dict[str, float | None]]
    label_accuracy: float | None
    baseline: bool = False  # whether it is the attack that never sees the update
    declined: bool = True  # where it has no result: whether it said that it does not apply

    @property
    def rank(self) -> tuple[int, float]:
        mean = self.metrics.get("psnr", {}).get("mean") or 0.0
        return rank_of(self.verdict, self.declined), -mean


@dataclass(frozen=True)
class Status:
    """One run as the pages show it."""

    place: Place
    state: str
    spec: Spec | None = None
    rounds_done: int = 0
    rounds_total: int = 0
    attacks: list[AttackProgress] = field(default_factory=list)
    lessons: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    changed: float | None = None
    problems: list[str] = field(default_factory=list)
    report: bool = False
    now: float = 0.0

    @property
    def jobs_done(self) -> int:
        return sum(attack.done for attack in self.attacks)

    @property
    def jobs_failed(self) -> int:
        return sum(attack.failed for attack in self.attacks)

    @property
    def jobs_total(self) -> int:
        return sum(attack.total for attack in self.attacks)

    @property
    def verdicts(self) -> list[Outcome]:
        """The strongest first, without the baseline."""
        outcomes = [outcome for outcome in self.outcomes if not outcome.baseline]
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    @property
    def words(self) -> str:
        """How far it got, in one line."""
        if self.state == "damaged":
            return self.problems[0] if self.problems else "It cannot be read."
        if self.state == "planned":
            rounds, jobs = count(self.rounds_total, "round"), count(self.jobs_total, "attack job")
            return f"{rounds} and {jobs} to do"
        if self.state == "trained":
            return f"{count(self.rounds_done, 'round')}, no attack was run"
        failed = f", {self.jobs_failed} failed" if self.jobs_failed else ""
        if self.state == "finished":
            return f"{count(self.rounds_total, 'round')}, {count(self.jobs_total, 'job')}{failed}"
        jobs = f"{self.jobs_done} of {count(self.jobs_total, 'job')}{failed}"
        words = f"{self.rounds_done} of {count(self.rounds_total, 'round')}, {jobs}"
        settled = self.jobs_done + self.jobs_failed == self.jobs_total
        if settled and self.rounds_done == self.rounds_total:
            words += "; scores and report are next"
        return words

    @property
    def ago(self) -> str:
        """When something in it last changed."""
        if self.changed is None:
            return ""
        passed = max(0.0, self.now - self.changed)
        if passed < 5:
            return "changed just now"
        for unit, size, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
            if passed < until:
                return f"changed {passed / size:.0f} {unit} ago"
        return f"changed {passed / 86_400:.0f} days ago"


def status_of(files: Files, place: Place, *, now: float | None = None) -> Status:
    """Read the status of a run; what is wrong with it is reported, never raised."""
    now = time.time() if now is None else now
    root, problems = place.root, list[str]()
    about: dict[str, Any] = {"now": now, "problems": problems}
    about["report"] = exists(root, paths.REPORT)
    try:
        planned = files.parse(root, paths.SPEC, Planned.parse)
        if planned is None:
            raise RunError(f"{paths.SPEC} is gone.")
    except RunError as error:
        problems.append(reason(error))
        return Status(place, "damaged", changed=_last_change(root), **about)
    spec = planned.spec
    about |= {"spec": spec, "rounds_total": spec.train.rounds}
    about["rounds_done"] = min(spec.train.rounds, len(_rounds(files, root, problems)))
    try:
        outcomes = files.parse(root, paths.SUMMARY, _outcomes)
        failed = files.parse(root, paths.SUMMARY, _failed)
    except RunError as error:
        problems.insert(0, reason(error))
        return Status(place, "damaged", changed=_last_change(root), **about)
    if outcomes is not None:
        attacks = [
            AttackProgress(label, len(names) - bad, bad, 0, len(names))
            for label, names in planned.results.items()
            for bad in [min(len(names), (failed or {}).get(label, 0))]
        ]
        return Status(
            place,
            "finished",
            attacks=attacks,
            outcomes=outcomes,
            changed=_modified(root / paths.SUMMARY),
            **about,
        )
    attacks = [_jobs(files, root, label, names) for label, names in planned.results.items()]
    changed = _last_change(root)
    state = _state(about["rounds_done"], spec, attacks, root, now - (changed or 0.0))
    lessons = sum(len(list_lessons(memory)) for memory in (root / paths.LEARNED).glob("*"))
    return Status(place, state, attacks=attacks, lessons=lessons, changed=changed, **about)


def _state(rounds: int, spec: Spec, attacks: list[AttackProgress], root: Path, quiet: float) -> str:
    jobs = any(attack.done or attack.failed or attack.begun for attack in attacks)
    observed = any(_below(root / paths.OBSERVATIONS, 1))
    if not (rounds or jobs or observed):
        return "planned"
    if rounds == spec.train.rounds and not jobs and quiet > SETTLED_SECONDS:
        return "trained"
    return "running" if quiet <= QUIET_SECONDS else "stopped"


def rounds_of(files: Files, place: Place) -> list[dict[str, float | None]]:
    """The rounds so far; none where the table is missing or damaged (the status says so)."""
    return _rounds(files, place.root, [])


def _rounds(files: Files, root: Path, problems: list[str]) -> list[dict[str, float | None]]:
    try:
        return files.parse(root, paths.ROUNDS, _table) or []
    except RunError as error:
        problems.append(reason(error))
        return []


def _table(content: bytes) -> list[dict[str, float | None]]:
    table = pd.read_csv(io.BytesIO(content)).reindex(columns=ROUND_COLUMNS)
    table = table.apply(pd.to_numeric, errors="coerce")
    if len(table) and table["round"].isna().all():
        raise RunError(f"{paths.ROUNDS} has no rounds in it.")
    rows = table.dropna(subset=["round"]).drop_duplicates("round", keep="last")
    return [{str(k): _number(v) for k, v in row.items()} for row in rows.to_dict("records")]


def events_of(files: Files, place: Place) -> tuple[list[dict[str, str]], int]:
    """The newest events, the newest first, and how many lines cannot be read."""
    try:
        parsed = files.parse(place.root, paths.EVENTS, _events)
    except RunError as error:
        return [{"kind": "damaged", "message": reason(error), "where": ""}], 0
    events, damaged = parsed or ([], 0)
    return events[::-1][:EVENTS_SHOWN], damaged


def _events(content: bytes) -> tuple[list[dict[str, str]], int]:
    events, damaged = [], 0
    for line in content.split(b"\n"):
        try:
            event = parse_json(line + b"\n", paths.EVENTS, LINE_END)
            kind, message = str(event["kind"]), str(event["message"])
        except (DamagedError, KeyError, TypeError):
            damaged += bool(line.strip())
            continue
        where = ", ".join(f"{k} {event[k]}" for k in ("round", "client") if k in event)
        events.append({"kind": kind.replace("_", " "), "message": message, "where": where})
    return events, damaged


def failures_of(files: Files, place: Place) -> list[str]:
    """A few reasons why jobs failed, each once."""
    reasons: dict[str, None] = {}
    folder = place.root / paths.RECONSTRUCTIONS
    for path in sorted(folder.glob(f"*/*/*{paths.FAILURE}")):
        name = str(path.relative_to(place.root))
        try:
            if files.parse(place.root, name, _kind) == SPARED:
                continue
            words = files.parse(place.root, name, _failure)
        except RunError as error:
            words = reason(error)
        if words:
            reasons.setdefault(words)
        if len(reasons) == FAILURES_SHOWN:
            break
    return list(reasons)


def _failure(content: bytes) -> str:
    failure = parse_json(content, "why a job failed")
    return f"{failure['job']}: {failure['reason']}"


def _outcomes(content: bytes) -> list[Outcome]:
    """The verdicts of a summary; anything that is not one raises."""
    summary = parse_json(content, paths.SUMMARY)
    return [
        Outcome(
            attack=str(entry["attack"]),
            verdict=str(entry["verdict"]),
            words=str(entry.get("words", "")),
            images=int(entry.get("images", 0)),
            victims=int(entry.get("groups", entry.get("victims", 0))),
            metrics={
                str(name): {str(k): _number(v) for k, v in values.items()}
                for name, values in entry.get("metrics", {}).items()
            },
            label_accuracy=_number(entry.get("label_accuracy")),
            baseline=entry["attack"] == baseline_of(summary),
            declined=bool(entry.get("declined", True)),
        )
        for entry in summary["verdicts"]
    ]


def _failed(content: bytes) -> dict[str, int]:
    counts: dict[str, int] = {}
    for job in parse_json(content, paths.SUMMARY).get("failed_jobs", []):
        counts[str(job.get("attack"))] = counts.get(str(job.get("attack")), 0) + 1
    return counts


def _jobs(files: Files, root: Path, label: str, names: frozenset[str]) -> AttackProgress:
    folder = root / paths.RECONSTRUCTIONS / label
    done, failed, begun = set[str](), set[str](), set[str]()
    if inside(root, folder):
        for path in _below(folder, 2):
            name = f"{path.parent.name}/{path.name}"
            for ending, results in (
                (paths.NOTEBOOK, begun),
                (paths.FAILURE, failed),
                (paths.RESULT, done),
            ):
                if name.endswith(ending):
                    results.add(name.removesuffix(ending))
                    break
    done &= names
    failed = (failed & names) - done
    needless = {name for name in failed if _was_spared(files, root, label, name)}
    done, failed = done | needless, failed - needless
    return AttackProgress(
        label, len(done), len(failed), len((begun & names) - done - failed), len(names)
    )


def _was_spared(files: Files, root: Path, label: str, name: str) -> bool:
    """Whether a job was left undone because it was not needed."""
    path = f"{paths.RECONSTRUCTIONS}/{label}/{name}{paths.FAILURE}"
    try:
        return files.parse(root, path, _kind) == SPARED
    except RunError:
        return False


def _kind(content: bytes) -> str:
    return str(parse_json(content, "why a job failed").get("kind"))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """What lies exactly so deep, without links; nothing where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            listed = [(e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries]
    except OSError:  # not there, or removed while it was read
        return
    for name, is_folder, is_link in listed:
        if is_link:
            continue
        if depth == 1:
            yield folder / name
        elif is_folder:
            yield from _below(folder / name, depth - 1)


def _last_change(root: Path) -> float | None:
    """When a file last changed: each replaces another, which changes its folder."""
    places = [root, root / paths.SPEC, root / paths.SUMMARY]
    for name, depth in (
        (paths.OBSERVATIONS, 1),
        (paths.RECONSTRUCTIONS, 2),
        (paths.LEARNED, 1),
    ):
        places.append(root / name)
        for level in range(1, depth + 1):
            places += _below(root / name, level)
    times = [at for path in places if (at := _modified(path)) is not None]
    return max(times, default=None)


def _modified(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
