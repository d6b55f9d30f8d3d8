"""A table of finished audits: means over batches, with bootstrap intervals.

    python experiments/table.py RUN [RUN ...]

One row per attack (and run, where there are several). The unit is the batch, because the images of
one batch are attacked together: means are over batches, each the mean of its trials, and intervals
resample batches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.core.metrics import METRICS
from fedsim.core.run import Run
from fedsim.scoring.statistics import resampled

COLUMNS = [METRICS[name] for name in ("psnr", "ssim", "fft2d")]


def interval(values: np.ndarray, digits: int | None = None) -> str:
    """Mean and 95 % bootstrap interval."""
    low, high = resampled(list(values[:, None]), seed=0)
    if digits is None:
        digits = 1 if abs(values.mean()) >= 2 else 3
    return f"{values.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def rows(run: Run) -> list[list[str]]:
    scores = run.scores
    scores["label"] = (scores["label_true"] == scores["label_recovered"]).astype(float)
    lines = []
    for attack, group in scores.groupby("attack", sort=False):
        batches = group.groupby(["round", "client"])
        columns = [metric.name for metric in COLUMNS]
        means: pd.DataFrame = batches[[*columns, "label", "seconds"]].mean()
        lines.append(
            [
                str(attack),
                *[interval(means[column].to_numpy()) for column in columns],
                f"{100 * means['label'].mean():.0f} %"
                if group["label_recovered"].notna().any()
                else "",
                f"{means['seconds'].median():.0f}",
                str(len(means)),
            ]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    titles = [metric.title for metric in COLUMNS]
    head = ["attack", *titles, "labels", "seconds", "batches"]
    several = len(options.runs) > 1
    if several:
        head.insert(0, "run")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for path in options.runs:
        run = Run(path)
        for row in rows(run):
            cells = [run.spec.name, *row] if several else row
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
