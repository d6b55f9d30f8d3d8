"""Does leakage fall from one strength to the next? With intervals, victim by victim.

    python -m experiments.orderings BENCH

For every defense of a finished bench and every attack: mean PSNR at each strength, and its
difference from the step before over the same victims (95 %, resampling victims). Of an attack that
ran both ways, the one that adapts to the defense is compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from experiments.table import interval
from fedsim.bench.cells import UNDEFENDED
from fedsim.campaign.suites import NAIVE
from fedsim.core.attack import BASELINE

VICTIM = ["seed", "round", "client"]


def ladders(pictures: pd.DataFrame) -> dict[str, list[str]]:
    """The strengths of every defense, mild first, as the bench listed them."""
    strengths: dict[str, list[str]] = {}
    for defense, strength in pictures[["defense", "strength"]].drop_duplicates().to_numpy():
        if defense != UNDEFENDED:
            strengths.setdefault(defense, []).append(strength)
    return strengths


def by_victim(pictures: pd.DataFrame, defense: str, strength: str, attack: str) -> pd.Series:
    here = (pictures["defense"] == defense) & (pictures["strength"] == strength)
    return pictures[here & (pictures["attack"] == attack)].groupby(VICTIM)["psnr"].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bench", type=Path)
    root = parser.parse_args().bench
    pictures = pd.read_csv(root / "pictures.csv", keep_default_na=False, na_values=[""])
    pictures["strength"] = pictures["strength"].fillna("").astype(str)
    cells = pd.read_csv(root / "cells.csv")
    known = cells.loc[cells["baseline"], "attack"] if "baseline" in cells else [BASELINE]
    attacks = [
        name
        for name in dict.fromkeys(pictures["attack"])
        if name not in set(known) and not name.endswith(NAIVE)
    ]
    print("| defense | strength | attack | PSNR, dB | from the step before, dB |")
    print("|---|---|---|---|---|")
    for defense, strengths in ladders(pictures).items():
        for attack in attacks:
            before = by_victim(pictures, UNDEFENDED, "", attack)
            for strength in strengths:
                here = by_victim(pictures, defense, strength, attack)
                if here.empty:
                    print(f"| {defense} | {strength} | {attack} | no result | |")
                    continue
                apart = (here - before).dropna().to_numpy()
                change = interval(apart, digits=1) if len(apart) else ""
                mean = interval(here.to_numpy(), digits=1)
                print(f"| {defense} | {strength} | {attack} | {mean} | {change} |")
                before = here


if __name__ == "__main__":
    main()
