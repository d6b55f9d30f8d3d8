"""A table of finished audits: means over batches, with 95 % intervals.

    python experiments/table.py RUN [RUN ...] [--against ATTACK] [--mean-picture]

One row per attack (and run, where there are several). The unit is the batch, because the images of
one batch are attacked together: means are over batches, each the mean of its trials; intervals are
Student's over batches, and that of a rate is exact (`fedsim.scoring.statistics`). ``--against``:
the same, as differences from another attack on the same batches. ``--mean-picture`` adds what the
mean of all victims' pictures scores, which the truth alone can draw: the line to read faces
against.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedsim.core.errors import FedsimError
from fedsim.core.metrics import METRICS, fft2d, lpips, psnr, ssim
from fedsim.core.run import Run
from fedsim.core.vault import Vault
from fedsim.scoring.statistics import mean_interval, rate

MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "psnr": psnr,
    "ssim": ssim,
    "lpips": lpips,
    "fft2d": fft2d,
}
COLUMNS = [METRICS[name] for name in MEASURES]
MEAN = "mean picture"
IDENTIFIED = "identified"


def interval(values: np.ndarray, digits: int | None = None) -> str:
    """Mean and 95 % interval; of one value itself alone."""
    if digits is None:
        digits = 1 if abs(values.mean()) >= 2 else 3
    if len(values) == 1:
        return f"{values.mean():.{digits}f}"
    low, high = mean_interval(list(values[:, None]))
    return f"{values.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def by_batch(run: Run) -> dict[str, pd.DataFrame]:
    """For every attack a row per batch: the mean of each measure over its pictures."""
    scores = run.scores
    scores["label"] = (scores["label_true"] == scores["label_recovered"]).astype(float)
    scores.loc[scores["label_recovered"].isna(), "label"] = np.nan
    scores[IDENTIFIED] = 100 * scores[IDENTIFIED].astype(float)
    columns = [*(metric.name for metric in COLUMNS), IDENTIFIED, "label", "seconds"]
    return {
        str(attack): group.groupby(["round", "client"])[columns].mean()
        for attack, group in scores.groupby("attack", sort=False)
    }


def mean_picture(run: Run) -> pd.DataFrame:
    """What the mean of all pictures that were attacked scores: a row per batch."""
    places = run.scores[["round", "client"]].drop_duplicates().itertuples(index=False, name=None)
    truths = {place: Vault(run.vault).read(*place).images for place in places}
    mean = torch.cat(list(truths.values())).mean(0)
    rows = []
    for images in truths.values():
        values = {n: m(images, mean.expand_as(images)) for n, m in MEASURES.items()}
        rows.append({n: np.nan if v is None else float(v.mean()) for n, v in values.items()})
    table = pd.DataFrame(rows, index=pd.MultiIndex.from_tuples(truths, names=["round", "client"]))
    return table.reindex(columns=[*MEASURES, IDENTIFIED, "label", "seconds"])


def cell(values: pd.Series, digits: int | None = None) -> str:
    """One measure of one attack; empty where it was not taken."""
    measured = values.dropna().to_numpy(dtype=float)
    return interval(measured, digits) if len(measured) else ""


def identified(run: Run, attack: str) -> str:
    """The share of an attack's pictures that were told from others, with its exact interval."""
    looked_for = run.scores[run.scores["attack"] == attack].dropna(subset=[IDENTIFIED])
    if looked_for.empty:
        return ""
    told = {name: 100 * share for name, share in rate(looked_for, IDENTIFIED).items()}
    return f"{told['rate']:.0f} [{told['low']:.0f}, {told['high']:.0f}]"


def rows(run: Run, against: str | None = None, *, mean: bool = False) -> list[list[str]]:
    """The table's lines of one run."""
    batches = by_batch(run)
    if mean:
        batches[MEAN] = mean_picture(run)
    if against is not None and against not in batches:
        raise SystemExit(f"there is no attack '{against}' in {run.root}: {', '.join(batches)}")
    lines = []
    for attack, means in batches.items():
        if attack == against:
            continue
        measures = means
        if against is not None:
            measures = means - batches[against]
            if measures.dropna(how="all").empty:
                continue
        lines.append(
            [
                attack,
                *[cell(measures[metric.name]) for metric in COLUMNS],
                cell(measures[IDENTIFIED], 0) if against else identified(run, attack),
                f"{100 * means['label'].mean():.0f} %" if means["label"].notna().any() else "",
                f"{means['seconds'].median():.0f}" if means["seconds"].notna().any() else "",
                str(len(means)),
            ]
        )
    return lines


def lines_of(runs: Sequence[Run], against: str | None = None, *, mean: bool = False) -> list[str]:
    """The table as lines of markdown."""
    head = ["attack", *[metric.title for metric in COLUMNS], "identified, %"]
    head += ["labels", "seconds", "batches"]
    if against:
        head[0] = f"attack, minus {against}"
    several = len(runs) > 1
    if several:
        head.insert(0, "run")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for run in runs:
        for row in rows(run, against, mean=mean):
            cells = [run.spec.name, *row] if several else row
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--against", metavar="ATTACK")
    parser.add_argument("--mean-picture", action="store_true")
    options = parser.parse_args()
    runs = [Run(path) for path in options.runs]
    try:
        print("\n".join(lines_of(runs, options.against, mean=options.mean_picture)))
    except FedsimError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
