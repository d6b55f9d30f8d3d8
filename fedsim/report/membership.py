"""Membership on the page: how surely an attack told who was in a batch, as rows and curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedsim.campaign.candidates import ANY, MATCHED
from fedsim.core.errors import FedsimError
from fedsim.core.run import Run
from fedsim.report import plots
from fedsim.scoring.membership import STRATA, table_of
from fedsim.scoring.roc import curve

BESIDE = {MATCHED: "others with the same labels", ANY: "others with any labels"}
ALONE = "the label alone"


@dataclass(frozen=True)
class Section:
    """What the page says of one attack."""

    attack: str
    verdict: str
    words: str
    rows: list[dict[str, Any]]  # an area each, with ``what`` it is of
    curves: Markup | None


def sections(run: Run, attacks: list[dict[str, Any]]) -> list[Section]:
    """One for each attack that told members from others."""
    told = [entry for entry in attacks if entry.get("membership")]
    if not told:
        return []
    try:
        table = table_of(run)
    except FedsimError:  # the numbers are in the summary; the curves are lost with it
        table = pd.DataFrame()
    return [_section(entry, table) for entry in told]


def _section(entry: dict[str, Any], table: pd.DataFrame) -> Section:
    found, name = entry["membership"], entry["attack"]
    named = [(f"score, beside {BESIDE[s]}", found[s]) for s in STRATA]
    named += [(f"{ALONE}, beside {BESIDE[s]}", found["label_only"][s]) for s in STRATA]
    rows = [{"what": what, **area} for what, area in named if area is not None]
    drawn = None if table.empty else _curves(name, table[table["attack"] == name])
    return Section(name, entry["verdict"], entry["words"], rows, drawn)


def _curves(name: str, own: pd.DataFrame) -> Markup:
    members = own[own["member"] == 1]
    drawn = {}
    for column, what in (("score", ""), ("label_only", f"{ALONE}, ")):
        for stratum in STRATA:
            others = own[own["stratum"] == stratum]
            sides = [side[column].dropna().to_numpy(float) for side in (members, others)]
            if all(map(len, sides)) and not (what and stratum == MATCHED):  # chance, by design
                drawn[f"{what}{BESIDE[stratum]}"] = curve(*sides)
    return plots.roc(name, drawn)
