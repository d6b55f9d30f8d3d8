"""Suites in a bench: two lines of the table stand for all members.

The first, called by the suite's version, is the worst case of every picture over the members; the
second what an attacker would have picked. The members' own rows stay in ``pictures.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedsim.bench.doubts import doubt_of, gathered
from fedsim.campaign.suites import lines_of
from fedsim.core.run import Run
from fedsim.core.run.paths import ENVELOPE
from fedsim.scoring.statistics import KEYS, VICTIM


def names_of(suite: Mapping[str, Any]) -> tuple[str, str]:
    """What the two lines of a suite are called."""
    return lines_of(suite["version"])


def suite_rows(run: Run, suite: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of the scores that are the worst case, and those that are the pick, each under the
    name of its line, with the ``member`` that they are of."""
    scores, envelope = run.scores, envelope_in(run)
    lines = []
    for name, (attack, trial) in zip(
        names_of(suite), (("attack", "trial"), ("picked", "picked_trial")), strict=True
    ):
        wanted = envelope[[*KEYS, attack, trial]].dropna()
        wanted = wanted.rename(columns={attack: "attack", trial: "trial"})
        wanted = wanted.astype({"trial": scores["trial"].dtype})
        rows = scores.merge(wanted, on=[*KEYS, "attack", "trial"])
        lines.append(rows.assign(member=rows["attack"], attack=name))
    return pd.concat(lines, ignore_index=True)


def envelope_in(run: Run) -> pd.DataFrame:
    """The envelope of a run; without a row where nothing was scored, as where guards let nobody
    upload."""
    if (run.root / ENVELOPE).is_file():
        return run.envelope
    return pd.DataFrame(columns=[*KEYS, "attack", "trial", "picked", "picked_trial"])


def suite_outcomes(
    suite: Mapping[str, Any],
    verdicts: list[Mapping[str, Any]],
    failed: list[Mapping[str, str]],
    envelope: pd.DataFrame,
) -> list[dict[str, Any]]:
    """What the two lines came to: the members' strongest verdict, and the doubts of all. Where
    nothing tells how well it explains an update, nobody picks, and that victim is none of its."""
    members = {member["attack"] for member in suite["members"]}
    own = [entry for entry in verdicts if entry["attack"] in members]
    asked = max((e.get("victims_of", 0) + e.get("spared", 0) for e in own), default=0)
    seen = max((e.get("victims", 0) + e.get("spared", 0) for e in own), default=0)
    about = {
        "verdict": suite["verdict"],
        "doubt": gathered(doubt_of(entry, failed) for entry in own),
        "victims": seen,
        "victims_of": asked,
        "flags": ", ".join(flag["flag"] for flag in suite["flags"]),
    }
    worst, picked = names_of(suite)
    told = envelope.dropna(subset=["picked"]).groupby(VICTIM).ngroups
    return [
        {"attack": worst, "baseline": False, **about},
        {"attack": picked, "baseline": False, **about, "victims": min(seen, told)},
    ]
