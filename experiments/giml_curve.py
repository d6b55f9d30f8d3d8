"""GIML over its meta-steps, as a table and a picture, from finished audits that differ in seed.

    python -m experiments.giml_curve RUN [RUN ...] [-o curve.png]

Points of a curve are attacks titled `NAME N`, after N meta-steps: `giml N` learned from the clients
that are attacked, `other people N` from other clients of the same kind, `control N` from clients
with data of another kind. `wrong domain` and the victims' own mean picture are lines.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

from experiments.compare import MEAN, batches
from experiments.table import interval
from fedsim.core.run import Run
from fedsim.scoring.statistics import mean_interval

CURVES = {
    "giml": ("GI-z, generator learned by GIML from these clients", "#a8261b"),
    "other people": ("the same, learned from other clients", "#1f5f8b"),
    "control": ("the same, learned from data of another kind", "#5c636b"),
}
LINES = {"wrong domain": "GI-z, generator trained on another kind", MEAN: "the mean picture"}


def curve(tables: list[pd.DataFrame], word: str) -> dict[int, list[np.ndarray]]:
    """Meta-steps to the PSNR of the batches of every run that has them."""
    points: dict[int, list[np.ndarray]] = {}
    for table in tables:
        for name in table.columns:
            if match := re.fullmatch(rf"{word} (\d+)", name):
                points.setdefault(int(match[1]), []).append(table[name].dropna().to_numpy())
    return dict(sorted(points.items()))


def independent(runs: list[np.ndarray]) -> np.ndarray:
    """What an interval is over: the means of several runs, each of which learned a generator of its
    own, or the batches of one."""
    return runs[0] if len(runs) == 1 else np.array([values.mean() for values in runs])


def draw(
    curves: dict[str, dict[int, list[np.ndarray]]], lines: dict[str, float], path: Path
) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 3.6), layout="constrained")
    for word, points in curves.items():
        words, colour = CURVES[word]
        values = {step: independent(runs) for step, runs in points.items()}
        means = [v.mean() for v in values.values()]
        errors = [v.mean() - mean_interval(list(v[:, None]))[0] for v in values.values()]
        axes.errorbar(
            list(values), means, errors, marker="o", ms=4, capsize=2, label=words, c=colour
        )
    for name, value in lines.items():
        axes.axhline(value, ls="--" if name == MEAN else ":", c="#41566e", lw=1.1)
        axes.annotate(
            LINES[name],
            (0.01, value),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=8,
            color="#41566e",
        )
    axes.set(
        xlabel="meta-steps",
        ylabel="PSNR, dB",
        xticks=sorted({s for p in curves.values() for s in p}),
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    tables = [batches(Run(path)) for path in options.runs]
    curves = {word: points for word in CURVES if (points := curve(tables, word))}
    print("| generator | PSNR, dB | a run |\n|---|---|---|")
    for word, points in curves.items():
        for step, runs in points.items():
            shown = ", ".join(f"{values.mean():.1f}" for values in runs)
            print(f"| {word}, {step} meta-steps | {interval(independent(runs))} | {shown} |")
    lines = {}
    for name, words in LINES.items():
        columns = [t[name].dropna().to_numpy() for t in tables if name in t and "giml 0" in t]
        if columns:
            lines[name] = float(np.concatenate(columns).mean())
            shown = ", ".join(f"{column.mean():.1f}" for column in columns)
            print(f"| {words} | {interval(independent(columns))} | {shown} |")
    if options.output:
        draw(curves, lines, options.output)


if __name__ == "__main__":
    main()
