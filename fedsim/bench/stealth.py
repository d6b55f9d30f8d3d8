"""Stealth: how loud an active server is to its clients' guards, beside what it gets.

A guard's loudness is its score over its limit, the median over the clients that were tampered with:
from 1 on it speaks up. A gentler manoeuvre is to the left, one that takes more is higher.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedsim.bench.table import CELL
from fedsim.core.files import write_atomically
from fedsim.core.text import encoded

COLUMNS = [*CELL, "seed", "guard", "loudness", "noticed", "tampered", "false_alarms", "honest"]
_COLOURS = ("#a8261b", "#2f5d8a", "#5d7a2f", "#8a5d2f", "#5d2f8a")
_LEAST, _MOST = 1e-2, 1e3  # of the picture: what is beyond is at its edge


def loudness_in(summary: Mapping[str, Any], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for every guard of a cell; none where no client had any."""
    noticed = summary.get("noticed") or {"rows": [], "guards": []}
    found = []
    for entry in noticed["guards"]:
        own = [r for r in noticed["rows"] if r["guard"] == entry["guard"] and r["tampered"]]
        loud = [_loudness(float(r["score"]), float(r["limit"])) for r in own]
        found.append(
            {
                **about,
                "guard": entry["guard"],
                "loudness": statistics.median(loud) if loud else None,
                **{name: entry[name] for name in COLUMNS[-4:]},
            }
        )
    return found


def _loudness(score: float, limit: float) -> float:
    """A guard that takes nothing at all is silent or beyond its limit."""
    if limit > 0:
        return min(score / limit, 1e30)
    return 0.0 if score <= limit else 1e30


def write_stealth(root: Path, guards: pd.DataFrame, measured: pd.DataFrame) -> bool:
    """``stealth.csv``, ``stealth.png`` and ``stealth.svg``, where a server was active and watched;
    returns whether it was. ``measured`` is the bench's table: what the strongest attack got."""
    watched = guards[guards["tampered"] > 0] if len(guards) else guards
    if watched.empty:
        return False
    got = {"psnr_worst": "max", "recovered": "max", "accuracy": "first"}
    leaks = measured.groupby(CELL, sort=False).agg(got).reset_index()
    table = watched.merge(leaks, on=CELL, how="left")
    write_atomically(root / "stealth.csv", encoded(table.to_csv(index=False)))
    figure = drawing(table)
    for suffix in ("png", "svg"):
        image = io.BytesIO()
        bare = dict.fromkeys(("Date", "Creator", "Format", "Type")) if suffix == "svg" else None
        figure.savefig(image, format=suffix, dpi=160, metadata=bare)
        write_atomically(root / f"stealth.{suffix}", image.getvalue())
    return True


def drawing(table: pd.DataFrame) -> Figure:
    """What the server gets of the worst-hit client against how loud it is, a line per guard."""
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
    for colour, (guard, rows) in zip(
        _COLOURS * 9, table.groupby("guard", sort=False), strict=False
    ):
        means = rows.groupby(CELL, sort=False)[["loudness", "psnr_worst"]].mean().dropna()
        if means.empty:
            continue
        x = means["loudness"].clip(_LEAST, _MOST)
        axes.plot(x, means["psnr_worst"], "o-", color=colour, lw=1, ms=4, label=guard)
        for label, across, up in zip(means.index, x, means["psnr_worst"], strict=True):
            axes.annotate(
                " ".join(map(str, label)).strip(),
                (across, up),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=6,
                color="#58616b",
            )
    axes.axvline(1, color="#1c2128", lw=0.8, ls="--")
    axes.set(
        xscale="log",
        xlim=(_LEAST / 1.5, _MOST * 3),
        xlabel="how loud: a guard's score over its limit (from the dashed line on it speaks up)",
        ylabel="closest picture, dB",
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
