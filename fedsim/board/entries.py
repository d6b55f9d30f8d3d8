"""Entries: the runs that may stand on the board, and what each brings.

A run enters with the pictures of its standard suite, or it is refused in a sentence. What makes its
numbers worth less without making them wrong is a flag, which travels with them.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.audit.captured import is_own
from fedsim.audit.cost import upload_bytes
from fedsim.audit.trust import named_in, refuse_strangers
from fedsim.board.federations import Federation, defense_of, federation_of
from fedsim.board.records import Record, read_records
from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.reading import read_file
from fedsim.core.run import Run
from fedsim.core.run.paths import ENVELOPE
from fedsim.core.spec import Spec

BENCH, CELLS, CELLS_TABLE = "bench.json", "cells", "cells.csv"
PLACE = ["round", "client", "image"]
TRIES = ("attack", "trial", "picked", "picked_trial", "picture")
NUMBERS = (
    *("psnr", "ssim", "lpips", "identified", "label_true", "label_recovered"),
    *("picked_psnr", "picked_ssim", "picked_lpips", "picked_identified"),
)
_VERSION = re.compile(r"standard-\d{1,6}")
_CANARY, _INCOMPLETE = "canary", "incomplete"


@dataclass(frozen=True)
class Flag:
    """A reason to believe a number less."""

    flag: str
    words: str


@dataclass(frozen=True)
class Cost:
    """What the defense takes. Accuracies of the same ``measure`` can be compared."""

    measure: str
    accuracy: float | None
    upload_bytes: int | None
    epsilon: float | None


@dataclass(frozen=True)
class Entry:
    """One run on the board."""

    run: Run
    spec: Spec
    federation: Federation
    defense: str
    strength: str
    defense_key: str
    suite: str
    pictures: pd.DataFrame  # the envelope, with the ``digest`` of each true picture
    cost: Cost
    measured_by: str
    members: list[dict[str, Any]] = field(default_factory=list)
    evaluations: int = 0
    labels: float | None = None  # the largest share that any member read
    membership: dict[str, float] | None = None
    flags: list[Flag] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """A run that does not enter, and why."""

    place: str
    why: str


@dataclass(frozen=True)
class _Source:
    """A run directory, and what it costs where its bench says so."""

    root: Path
    place: str
    cost: Cost | None = None


def read_entries(
    roots: Iterable[str | Path], *, trust: bool = False
) -> tuple[list[Entry], list[Refused], list[str]]:
    """Every run and every cell of a bench: those that enter, those that do not, and what is to be
    told of them."""
    entries, refused, notes = list[Entry](), list[Refused](), list[str]()
    for root in map(Path, roots):
        try:
            sources = list(_sources(root))
        except FedsimError as error:
            refused.append(Refused(root.name, str(error)))
            continue
        for source in sources:
            try:
                entry, wrong = _entry(source, trust=trust)
                _refuse_twice(entry, entries)
            except FedsimError as error:
                refused.append(Refused(source.place, str(error)))
            except (KeyError, TypeError, AttributeError, ValueError):  # sealed, and none of ours
                refused.append(Refused(source.place, "its summary is not what fedsim writes."))
            else:
                entries.append(entry)
                notes += wrong
    return entries, refused, notes


def _sources(root: Path) -> Iterator[_Source]:
    """The runs behind a directory: itself, or the cells of a bench."""
    if not (root / BENCH).is_file():
        yield _Source(root, root.name)
        return
    costs = _costs(root)
    folder = root / CELLS
    cells = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for cell in cells:
        spec = Run.open(cell).spec
        yield _Source(cell, f"{root.name}/{cell.name}", costs.get((spec.name, spec.seed)))


def _costs(root: Path) -> dict[tuple[str, int], Cost]:
    """What each cell costs, by its label and seed: its accuracy is that of a federation of its
    own."""
    measure = hashlib.sha256(_content(root / BENCH)).hexdigest()
    try:
        words = {"defense": str, "strength": str}
        table = pd.read_csv(
            io.BytesIO(_content(root / CELLS_TABLE)),
            dtype=words,
            na_filter=True,
        )
        table = table.fillna({"defense": "", "strength": ""})
        costs = {}
        for row in table.to_dict("records"):
            label = f"{row['defense']} {row['strength']}".strip()
            numbers = [_number(row[name]) for name in ("accuracy", "upload_bytes", "epsilon")]
            accuracy, size, epsilon = numbers
            about = (accuracy, None if size is None else int(size), epsilon)
            costs[label, int(row["seed"])] = Cost(measure, *about)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"'{root / CELLS_TABLE}' is damaged; say `fedsim bench` again.") from error
    return costs


def _entry(source: _Source, *, trust: bool) -> tuple[Entry, list[str]]:
    """One run, checked against the rules of entry (docs/board.md)."""
    run = Run.open(source.root)
    if not is_own(run):
        refuse_strangers(source.root, named_in(run), trust=trust)
    spec = run.spec
    if not run.summary_path.is_file() or not run.is_concluded(spec):
        raise RunError(f"it is not concluded: run `fedsim audit --resume {source.root}`.")
    summary = run.summary
    suite = summary.get("suite")
    if not isinstance(suite, Mapping):
        raise RunError(
            "it was not attacked by the standard suite: audit it with attacks: standard."
        )
    version = str(suite.get("version"))
    if _VERSION.fullmatch(version) is None:
        raise RunError(f"its suite is {version!r:.40}, which is no standard one.")
    pictures = _pictures(run)
    records, wrong = read_records(run)
    defense, strength, key = defense_of(spec)
    entry = Entry(
        run=run,
        spec=spec,
        federation=federation_of(spec),
        defense=defense,
        strength=strength,
        defense_key=key,
        suite=f"{version}, exhaustive" if suite.get("exhaustive") else version,
        pictures=pictures,
        cost=source.cost or _own_cost(run, summary),
        measured_by=_measured_by(summary),
        members=[dict(m) for m in suite.get("members") or [] if isinstance(m, Mapping)],
        evaluations=int(suite.get("evaluations") or 0),
        labels=_number((suite.get("envelope") or {}).get("labels")),
        membership=_membership(summary),
        flags=_flags(suite, summary),
        records=records,
    )
    return entry, [f"{source.place}: {words}" for words in wrong]


def _refuse_twice(entry: Entry, others: Iterable[Entry]) -> None:
    """Raise where a run stands on the board already: counted twice it would look surer."""
    for other in others:
        if other.spec.digest() == entry.spec.digest() and other.suite == entry.suite:
            raise RunError("a run of the same spec and suite is on the board already.")


def _pictures(run: Run) -> pd.DataFrame:
    """The envelope of a run, held to its scores: a row for each true picture of each victim."""
    path = run.root / ENVELOPE
    if not path.is_file():
        raise RunError(f"there is no {ENVELOPE}: no picture of it was scored.")
    known = run.scores[[*PLACE, "digest"]].drop_duplicates(PLACE)
    if known.empty:
        raise RunError("it has no scores: nobody kept the truth of its clients.")
    try:
        table = pd.read_csv(io.BytesIO(_content(path)))[[*PLACE, *NUMBERS, *TRIES, "recovered"]]
        for name in (*PLACE, *NUMBERS):
            table[name] = pd.to_numeric(table[name])
        table["recovered"] = table["recovered"].map(_as_bool)
        # Where no member can tell how well it explains the update, there is nothing to pick by.
        table["picked"] = table["picked"].fillna("")
        table["picked_trial"] = table["picked_trial"].fillna(0).astype(int)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"its {ENVELOPE} is damaged; run `fedsim report` on it.") from error
    both = table.merge(known, on=PLACE, how="inner", validate="one_to_one")
    if not len(table) == len(both) == len(known) or table["psnr"].isna().any():
        raise RunError(f"its {ENVELOPE} is not of its scores; run `fedsim report` on it.")
    return both


def _as_bool(value: Any) -> bool:
    return {"True": True, "False": False, "1": True, "0": False}[str(value)]


def _flags(suite: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Flag]:
    """Those of the suite, and what the verdicts say of the run."""
    flags = [
        Flag(str(one["flag"]), str(one.get("words", "")))
        for one in suite.get("flags") or []
        if isinstance(one, Mapping) and "flag" in one
    ]
    verdicts = [one for one in summary["verdicts"] if not one.get("is_baseline")]
    known = {flag.flag for flag in flags}
    if _CANARY not in known and any(not v.get("canary", {}).get("ok", True) for v in verdicts):
        words = "MIS-SPECIFIED: the attacks simulated another protocol than the clients followed."
        flags.append(Flag(_CANARY, words))
    lacking = [v["lacking"] for v in verdicts if v.get("lacking")]
    crashed = [j for j in summary.get("failed_jobs", []) if j.get("kind") != "declined"]
    if lacking or crashed:
        words = f"{lacking[0]}." if lacking else f"{crashed[0].get('reason', 'a job failed')}"
        flags.append(Flag(_INCOMPLETE, f"INCOMPLETE: {words}"))
    return flags


def _membership(summary: Mapping[str, Any]) -> dict[str, float] | None:
    """Of all attacks on membership, what the strongest has on matched controls."""
    found = []
    for entry in summary["verdicts"]:
        matched = (entry.get("membership") or {}).get("matched") or {}
        numbers = {name: _number(matched.get(name)) for name in ("auc", "low", "high")}
        if numbers["auc"] is not None:
            found.append({k: v for k, v in numbers.items() if v is not None})
    return max(found, key=lambda one: one["auc"], default=None)


def _own_cost(run: Run, summary: Mapping[str, Any]) -> Cost:
    """What the attacked federation itself says, where no bench trained another."""
    accuracy = run.rounds.get("test_accuracy", pd.Series(dtype=float)).dropna()
    promised = [_number(one.get("epsilon")) for one in summary.get("privacy") or []]
    budgets = [epsilon for epsilon in promised if epsilon is not None]
    last = float(accuracy.iloc[-1]) if len(accuracy) else None
    return Cost("own", last, upload_bytes(run), min(budgets) if budgets else None)


def _measured_by(summary: Mapping[str, Any]) -> str:
    """The fedsim that measured it."""
    versions = summary.get("versions") or {}
    return f"{versions.get('fedsim', 'unknown')}, commit {versions.get('commit', 'unknown')}"


def _number(value: Any) -> float | None:
    number = pd.to_numeric(value, errors="coerce")
    return None if pd.isna(number) else float(number)


def _content(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise DamagedError(f"'{path}' cannot be read: {error.strerror}.") from error
