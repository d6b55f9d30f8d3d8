"""Attacks of finished audits against each other, batch by batch.

    python -m experiments.compare RUN [--tune RUN] [--pair A B]... [--other RUN A B]...

Prints mean PSNR with its interval, for every attack; with ``--tune`` also its mean on the batches
that parameters were chosen on, and which of the attacks that differ in ` tv ` alone wins there.
Each ``--pair`` is the mean of A - B over the same batches; ``--other`` takes B from another run of
the same victims. The victims' own mean picture stands beside them, which only the truth can draw.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.table import MEAN, interval
from fedsim.core.metrics import psnr
from fedsim.core.run import Run
from fedsim.core.vault import Vault


def batches(run: Run) -> pd.DataFrame:
    """Mean PSNR of every batch: a row per batch, a column per attack."""
    keys = ["round", "client", "trial"]
    table = run.scores.groupby([*keys, "attack"], sort=False)["psnr"].mean().unstack("attack")
    table = table.groupby(level=["round", "client"]).mean()
    truths = {at: Vault(run.vault).read(*at).images for at in table.index}
    picture = np.stack([t.numpy() for images in truths.values() for t in images]).mean(0)
    table[MEAN] = [
        float(psnr(images, images.new_tensor(picture).expand_as(images)).mean())
        for images in truths.values()
    ]
    return table


def tuned(tune: pd.DataFrame) -> dict[str, str]:
    """Of every search space, the attack whose total variation did best where it was chosen."""
    best: dict[str, str] = {}
    for name in tune.columns:
        space = name.split(" tv ")[0]
        if " tv " in name and (space not in best or tune[name].mean() > tune[best[space]].mean()):
            best[space] = name
    return best


def difference(name: str, one: pd.Series, two: pd.Series) -> str:
    apart = (one - two).dropna().to_numpy()
    return f"{name}: {interval(apart, digits=1)} dB over {len(apart)} batches"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tune", type=Path)
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"))
    parser.add_argument("--other", nargs=3, action="append", default=[], metavar=("RUN", "A", "B"))
    options = parser.parse_args()
    table = batches(Run(options.run))
    tune = batches(Run(options.tune)) if options.tune else None
    chosen = tuned(tune) if tune is not None else {}
    print(f"| attack | PSNR, dB |{' where tuned |' if tune is not None else ''}")
    print(f"|---|---|{'---|' if tune is not None else ''}")
    for name in table.columns:
        mark = " (chosen)" if name in chosen.values() else ""
        there = ""
        if tune is not None:
            there = f" {tune[name].mean():.1f} |" if name in tune else " |"
        print(f"| {name}{mark} | {interval(table[name].dropna().to_numpy())} |{there}")
    print()
    names = {f"tuned {space}": name for space, name in chosen.items()}
    for a, b in options.pair:
        one, two = names.get(a, a), names.get(b, b)
        print(f"- {difference(f'{a} - {b}', table[one], table[two])}")
    for path, a, b in options.other:
        other = batches(Run(Path(path)))
        one = table[names.get(a, a)]
        print(f"- {difference(f'{a} - {b} of {Run(path).spec.name}', one, other[names.get(b, b)])}")


if __name__ == "__main__":
    main()
