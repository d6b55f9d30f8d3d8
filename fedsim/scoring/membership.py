"""Membership: whether an attack told who was in a batch, from what it said of each candidate.

``membership.csv`` has a row for each candidate of each update: of which stratum it is (a member, or
another, matched to the members' labels or with any), the attack's score, and the score that it gave
to the candidate's label alone. Beside the matched ones that shortcut is worth nothing (each label
is there as often among members as among others), so the area there is what an update says of a
picture; beside the others it is how much a mere reading of labels explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedsim.campaign.candidates import ANY, MATCHED, MEMBER
from fedsim.campaign.granted_truth import asks_for_candidates, listed_for
from fedsim.campaign.jobs import Job
from fedsim.core.candidates import SCORES
from fedsim.core.errors import FedsimError, RunError
from fedsim.core.knowledge import granted_by
from fedsim.core.run import Run
from fedsim.scoring.roc import told_apart
from fedsim.scoring.scores import results_of

COLUMNS = [
    *("round", "client", "attack", "trial", "candidate", "stratum", "member", *SCORES, "digest")
]
TABLE = "membership"
STRATA = (MATCHED, ANY)
MARGIN = 0.05  # of the area above one half, that all of its interval must exceed


def membership_of(run: Run, jobs: Sequence[Job]) -> pd.DataFrame:
    """A row for each candidate of each finished job of an attack that was handed a list; empty
    where there is none. What does not fit is told among the run's events."""
    granted = granted_by(run.spec.threat)
    asked = {
        label: asks_for_candidates(component, granted)
        for label, component in {job.label: job.attack for job in jobs}.items()
    }
    rows: list[dict[str, Any]] = []
    for job, result in results_of((job for job in jobs if asked[job.label]), run.spec.seed):
        if result.membership is None:  # nothing was left in the update to tell of
            continue
        where = {"round": job.round, "client": job.client}
        try:
            there = listed_for(run, job)
        except FedsimError as error:
            run.note("not_scored", f"{job.name}: its candidates are not known: {error}", **where)
            continue
        if len(result.membership) != len(there.candidates):
            run.note("not_scored", f"{job.name}: it speaks of another list of candidates", **where)
            continue
        told = {"attack": job.label, "trial": job.trial}
        for at, said in enumerate(result.membership.tolist()):
            about = {"candidate": at, "stratum": there.strata[at], "digest": there.digests[at]}
            about["member"] = int(there.strata[at] == MEMBER)
            rows.append({**where, **told, **about, **dict(zip(SCORES, said, strict=False))})
    return pd.DataFrame(rows, columns=COLUMNS)


def table_of(run: Run) -> pd.DataFrame:
    """The table of a finished run."""
    path = run.root / f"{TABLE}.csv"
    try:
        return pd.read_csv(path)
    except FileNotFoundError:
        raise RunError(f"'{run.root}' has no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise RunError(f"'{path}' is damaged; `fedsim report` writes it again.") from error


def add_membership(verdicts: list[dict[str, Any]], table: pd.DataFrame) -> None:
    """Give the entries of attacks that told members from others what that is worth. Where nothing
    else decided, it decides: PARTIAL where the area beside matched others is surely above chance.
    """
    for entry in verdicts:
        own = table[table["attack"] == entry["attack"]]
        if own.empty or "metrics" not in entry:
            continue
        entry["membership"] = found = described(own)
        if entry["verdict"] == "NOT RECOVERED":
            entry["verdict"] = "PARTIAL" if found["told"] else "NOT RECOVERED"
            entry["words"] = words_of(entry)


def described(own: pd.DataFrame) -> dict[str, Any]:
    """The areas of one attack in both strata, and those of the label alone."""
    by_place = own.rename(columns={"candidate": "image", "digest": "picture"})
    members = by_place[by_place["member"] == 1]
    sides = {name: by_place[by_place["stratum"] == name] for name in STRATA}
    areas = {
        column: {name: told_apart(members, others, column) for name, others in sides.items()}
        for column in SCORES
    }
    matched = areas["score"][MATCHED]
    return {
        **areas["score"],
        "label_only": areas["label_only"],
        "told": matched is not None and matched["low"] > 0.5 + MARGIN,
        "margin": MARGIN,
        "victims": int(own.groupby(["round", "client"]).ngroups),
    }


def words_of(entry: dict[str, Any]) -> str:
    """What an entry says of membership, where nothing else is to be said of it."""
    found, name = entry["membership"], entry["attack"]
    behind = f"{entry['victims']} of {entry['victims_of']} victims"
    verb = "tells" if found["told"] else "does not tell"
    matched, free = found[MATCHED], found[ANY]
    told = (
        f"{name} claims no picture, and {verb} who was in a batch: beside others with the same "
        f"labels its AUC is {_area(matched)}{_sure(matched)}"
    )
    if free is not None:
        told += f"; beside any others {_area(free)}"
        alone = found["label_only"][ANY]
        told += f", of which the labels alone give {_area(alone)}" if alone is not None else ""
    stronger = "" if found["told"] else " A stronger attack may."
    return f"{told}; {behind}.{stronger}"


def _area(found: dict[str, Any] | None) -> str:
    if found is None:
        return "unknown"
    return f"{found['auc']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _sure(found: dict[str, Any] | None) -> str:
    """Who is told for sure; with too few others, above all of them."""
    if found is None:
        return ""
    if found["resolved"]:
        return f" ({found['tpr']:.0%} of the members at 1 % false positives)"
    return (
        f" ({found['tpr']:.0%} of the members above all {found['others']} others, too few to "
        f"resolve 1 % false positives)"
    )
