"""GIML over its meta-steps, as a table and a picture, from finished audits that differ in seed.

    python experiments/giml_curve.py RUN [RUN ...] [--control RUN ...] [-o curve.png]

Attacks titled `giml N` are points of the curve after N meta-steps; `wrong domain` and the victims'
own mean picture are lines. ``--control``: runs in which attacks titled `control N` search
generators that learned from gradients of other data.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from compare import MEAN, batches
from table import interval

from fedsim.core.store import Run

LINES = {"wrong domain": "GI-z, generator of another domain", MEAN: "the victims' mean picture"}


def curve(tables: list[pd.DataFrame], word: str) -> dict[int, np.ndarray]:
    """Meta-steps to the PSNR of every batch of every run."""
    found: dict[int, list[np.ndarray]] = {}
    for table in tables:
        for name in table.columns:
            if match := re.fullmatch(rf"{word} (\d+)", name):
                found.setdefault(int(match[1]), []).append(table[name].dropna().to_numpy())
    return {step: np.concatenate(found[step]) for step in sorted(found)}


def draw(
    own: dict[int, np.ndarray], control: dict[int, np.ndarray], lines: dict[str, float], path: Path
) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
    for points, words, colour in (
        (own, "GI-z, generator learned by GIML", "#a8261b"),
        (control, "the same on gradients of other data", "#41566e"),
    ):
        if points:
            steps = list(points)
            means = [points[step].mean() for step in steps]
            errors = [1.96 * points[s].std() / len(points[s]) ** 0.5 for s in steps]
            axes.errorbar(steps, means, errors, marker="o", ms=4, capsize=2, label=words, c=colour)
    for name, value in lines.items():
        axes.axhline(value, ls="--" if name == MEAN else ":", c="#5c636b", lw=1.2)
        axes.annotate(
            LINES[name],
            (0.98, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="#41566e",
        )
    axes.set(xlabel="meta-steps", ylabel="PSNR, dB")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--control", nargs="+", type=Path, default=[])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    tables = [batches(Run(path)) for path in options.runs]
    own = curve(tables, "giml")
    control = curve([batches(Run(path)) for path in options.control], "control")
    lines = {
        name: float(np.mean([t[name].mean() for t in tables if name in t]))
        for name in LINES
        if any(name in t for t in tables)
    }
    print("| generator | PSNR, dB | a run |\n|---|---|---|")
    for word, points in (("giml", own), ("control", control)):
        chosen = tables if word == "giml" else [batches(Run(path)) for path in options.control]
        for step, values in points.items():
            runs = ", ".join(f"{t[f'{word} {step}'].mean():.1f}" for t in chosen)
            print(f"| {word}, {step} meta-steps | {interval(values)} | {runs} |")
    for name in lines:
        columns = [t[name].dropna().to_numpy() for t in tables if name in t]
        values = np.concatenate(columns)
        shown = ", ".join(f"{column.mean():.1f}" for column in columns)
        print(f"| {LINES[name]} | {interval(values)} | {shown} |")
    if options.output:
        draw(own, control, lines, options.output)


if __name__ == "__main__":
    main()
