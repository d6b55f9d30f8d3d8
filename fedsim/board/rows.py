"""Rows: what each defense comes to. Entries of the same federation, defense and suite are pooled,
a picture that several of them met counts once, and what another row beats is marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from fedsim.board.entries import Entry, Flag
from fedsim.board.federations import UNDEFENDED, Federation
from fedsim.board.records import Record, best_known
from fedsim.scoring.statistics import by_picture, clean, count_pictures, interval

SUITE_MEANS = ("psnr", "ssim", "lpips", "identified")
PICKED_MEANS = ("picked_psnr", "picked_ssim", "picked_lpips", "picked_identified")


@dataclass(frozen=True)
class Known:
    """The submission that lowers a row most."""

    record: Record
    psnr: float
    ssim: float
    recovered: float


@dataclass(frozen=True)
class Row:
    """One defense at one strength, as the board has it."""

    federation: Federation
    defense: str
    strength: str
    suite: str
    pictures: int
    victims: int
    seeds: int
    numbers: dict[str, float | None]
    worst_by: list[tuple[str, int]]  # members of the suite, by how many pictures they are best on
    picked_by: list[tuple[str, int]]
    evaluations: int
    accuracy: float | None
    kept: float | None  # of the undefended federation's accuracy
    upload_bytes: int | None
    epsilon: float | None
    flags: list[Flag]
    measured_by: list[str]
    specs: list[str]
    submissions: list[Known]  # the one that lowers it most first
    entries: list[Entry] = field(repr=False)
    dominated: bool = False

    @property
    def best(self) -> Known | None:
        """The submission that is known to do better than the suite."""
        first = self.submissions[0] if self.submissions else None
        return first if first is not None and first.psnr > (self.numbers["psnr"] or 0) else None

    @property
    def leak(self) -> float:
        """By what rows are compared: the mean over pictures of the closest that anybody came."""
        return self.best.psnr if self.best is not None else self.numbers["psnr"] or 0.0


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """The rows of the board, federation by federation, what leaks most first."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        key = entry.federation.key, entry.defense_key, entry.suite
        groups.setdefault(key, []).append(entry)
    sections: dict[str, list[list[Entry]]] = {}
    for (federation, _, _), group in groups.items():
        sections.setdefault(federation, []).append(group)
    rows = []
    for groups_here in sections.values():
        undefended = _undefended(groups_here)
        here = [_row(group, undefended) for group in groups_here]
        rows += sorted(_marked(here), key=lambda row: -row.leak)
    return rows


def _undefended(groups: Iterable[Sequence[Entry]]) -> dict[str, float]:
    """The accuracy without a defense, by what measured it."""
    found: dict[str, list[float]] = {}
    for entry in (entry for group in groups for entry in group):
        if entry.defense == UNDEFENDED and entry.cost.accuracy is not None:
            found.setdefault(entry.cost.measure, []).append(entry.cost.accuracy)
    return {measure: sum(values) / len(values) for measure, values in found.items()}


def _row(group: list[Entry], undefended: dict[str, float]) -> Row:
    first = group[0]
    pooled = _pooled([entry.pictures for entry in group])
    accuracy, kept = _accuracy(group, undefended)
    sizes = [entry.cost.upload_bytes for entry in group if entry.cost.upload_bytes is not None]
    budgets = [entry.cost.epsilon for entry in group if entry.cost.epsilon is not None]
    return Row(
        federation=first.federation,
        defense=first.defense,
        strength=first.strength,
        suite=first.suite,
        pictures=count_pictures(pooled),
        victims=int(pooled.groupby(["round", "client"]).ngroups),
        seeds=len(group),
        numbers={**_numbers(pooled), **_labels(group), **_membership(group)},
        worst_by=Counter(pooled["attack"]).most_common(),
        picked_by=Counter(name for name in pooled["picked"] if name).most_common(),
        evaluations=sum(entry.evaluations for entry in group),
        accuracy=accuracy,
        kept=kept,
        upload_bytes=round(sum(sizes) / len(sizes)) if sizes else None,
        epsilon=max(budgets) if budgets else None,
        flags=list(dict.fromkeys(flag for entry in group for flag in entry.flags)),
        measured_by=list(dict.fromkeys(entry.measured_by for entry in group)),
        specs=list(dict.fromkeys(entry.spec.digest() for entry in group)),
        submissions=_submissions(group),
        entries=group,
    )


def _pooled(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Pictures of several runs: their rounds are different ones, and so are their pictures, unless
    their pixels say that they are the same."""
    apart = []
    for number, table in enumerate(tables):
        own = table.assign(round=f"{number}/" + table["round"].astype(str))
        numbered = f"{number}/" + own["picture"].astype(str)
        apart.append(own.assign(picture=own["digest"].where(own["digest"].notna(), numbered)))
    return pd.concat(apart, ignore_index=True)


def _numbers(pooled: pd.DataFrame) -> dict[str, float | None]:
    """Means over pictures; the worst client and the worst picture."""
    right = (pooled["label_true"] == pooled["label_recovered"]).astype(float)
    rows = pooled.assign(labels=right, recovered=pooled["recovered"].astype(float))
    numbers = {name: _mean(rows, name) for name in (*SUITE_MEANS, "labels", *PICKED_MEANS)}
    numbers["psnr_low"], numbers["psnr_high"] = map(clean, interval(rows, "psnr"))
    clients = rows.groupby(["round", "client"])["psnr"].mean()
    numbers["psnr_client"] = clean(float(clients.max()))
    numbers["psnr_picture"] = clean(float(rows["psnr"].max()))
    # A picture that came back once has come back.
    numbers["recovered"] = clean(float(rows.groupby("picture")["recovered"].max().mean()))
    return numbers


def _mean(rows: pd.DataFrame, column: str) -> float | None:
    return None if rows[column].isna().all() else clean(by_picture(rows, column)["value"].mean())


def _labels(group: Sequence[Entry]) -> dict[str, float | None]:
    """The largest share that any member read, where the suite tells; mean over runs."""
    told = [entry.labels for entry in group if entry.labels is not None]
    return {"labels": sum(told) / len(told)} if len(told) == len(group) else {}


def _membership(group: Sequence[Entry]) -> dict[str, float | None]:
    """The mean over seeds, with the widest interval that any of them has."""
    known = [entry.membership for entry in group if entry.membership is not None]
    if not known:
        return {"membership": None, "membership_low": None, "membership_high": None}
    low = min(one.get("low", one["auc"]) for one in known)
    high = max(one.get("high", one["auc"]) for one in known)
    mean = sum(one["auc"] for one in known) / len(known)
    return {"membership": mean, "membership_low": low, "membership_high": high}


def _accuracy(
    group: Sequence[Entry], undefended: dict[str, float]
) -> tuple[float | None, float | None]:
    """The mean accuracy, of one measure alone, and how much of the undefended one's it is."""
    by_measure: dict[str, list[float]] = {}
    for entry in group:
        if entry.cost.accuracy is not None:
            by_measure.setdefault(entry.cost.measure, []).append(entry.cost.accuracy)
    ranked = sorted(by_measure, key=lambda measure: measure not in undefended)  # comparable first
    if not ranked:
        return None, None
    mean = sum(by_measure[ranked[0]]) / len(by_measure[ranked[0]])
    whole = undefended.get(ranked[0])
    return mean, mean / whole if whole else None


def _submissions(group: Sequence[Entry]) -> list[Known]:
    """What each submission makes of the row; one to a single seed leaves the others as they are."""
    found = []
    for at, entry in enumerate(group):
        for record, table in zip(
            entry.records, best_known(entry.records, entry.pictures), strict=True
        ):
            tables = [other.pictures for other in group]
            tables[at] = table
            numbers = _numbers(_pooled(tables))
            about = [numbers[name] or 0.0 for name in ("psnr", "ssim", "recovered")]
            found.append(Known(record, *about))
    return sorted(found, key=lambda known: -known.psnr)


def _marked(rows: list[Row]) -> list[Row]:
    """The rows of a federation, each with whether another beats it. A number in doubt beats none;
    the leak behind it is real, so it can be beaten."""
    return [replace(row, dominated=any(_beats(other, row) for other in rows)) for row in rows]


def _beats(one: Row, other: Row) -> bool:
    """Whether one leaks less and is more accurate: in both at least as good, in one better."""
    if one.flags or one.accuracy is None or other.accuracy is None or one is other:
        return False
    less, more = other.leak - one.leak, one.accuracy - other.accuracy
    return less >= 0 and more >= 0 and (less > 0 or more > 0)
