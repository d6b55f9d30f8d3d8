"""The report of a benchmark: the frontier, the table, and what each cell's pictures look like."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pandas as pd
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedsim.core.store import Run, write_atomically
from fedsim.planning import jobs_of, victims
from fedsim.report import HERE, environment
from fedsim.report.pictures import Pair, load_pairs, spread

if TYPE_CHECKING:
    from fedsim.bench import Bench, Cell

SHOWN = 4  # pictures a cell
INK, MUTED, FRONT = "#1c2128", "#8a929b", "#a8261b"


@dataclass(frozen=True)
class Row:
    """One cell as the page shows it."""

    label: str
    attack: str
    words: str
    front: bool
    pairs: list[Pair]


def write_bench_report(bench: Bench, root: Path, table: pd.DataFrame, markdown: str) -> None:
    """``frontier.png``, ``frontier.svg`` and ``report.html``."""
    from fedsim.bench import by_cell

    cells = by_cell(table)
    figure = frontier(cells)
    for suffix in ("png", "svg"):
        held = io.BytesIO()
        bare = dict.fromkeys(("Date", "Creator", "Format", "Type")) if suffix == "svg" else None
        figure.savefig(held, format=suffix, dpi=160, metadata=bare)
        write_atomically(root / f"frontier.{suffix}", held.getvalue())
    by_label = {cell.label: cell for cell in reversed(list(bench.cells()))}
    rows = []
    for entry in cells:
        label, attack = _label(entry), entry["attack"]
        words = f"{entry['psnr']:.1f} dB, SSIM {entry['ssim']:.2f}, "
        words += f"{100 * entry['recovered']:.0f} % recovered"
        if entry["accuracy"] is not None:
            words += f", accuracy {100 * entry['accuracy']:.0f} %"
        pairs = _pairs(root, by_label[label], attack)
        rows.append(Row(label, attack, words, entry["front"], pairs))
    svg = (root / "frontier.svg").read_text()
    page = (
        environment()
        .get_template("bench.html")
        .render(
            spec=bench.spec,
            section=bench.section,
            rows=rows,
            table=_cells(markdown),
            frontier=Markup(svg[svg.index("<svg") :]),
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        )
    )
    write_atomically(root / "report.html", page.lstrip().encode())


def frontier(cells: list[dict[str, Any]]) -> Figure:
    """Leakage of the strongest attack against accuracy; the cells nothing beats are joined."""
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
    known = [cell for cell in cells if cell["accuracy"] is not None]
    for cell in known:
        at = (100 * cell["accuracy"], cell["ssim"])
        axes.scatter(*at, color=FRONT if cell["front"] else MUTED, s=26, zorder=3)
        axes.annotate(
            _label(cell),
            at,
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=7,
            color=INK if cell["front"] else MUTED,
        )
    line = sorted((cell["accuracy"], cell["ssim"]) for cell in known if cell["front"])
    if line:
        accuracy, leakage = zip(*line, strict=True)
        percent = [100 * a for a in accuracy]
        axes.step(percent, leakage, where="post", color=FRONT, lw=1.2, alpha=0.7)
    axes.set(
        xlabel="test accuracy, %",
        ylabel="leakage: SSIM of the strongest attack",
        ylim=(-0.02, 1.05),
    )
    axes.margins(x=0.16)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label(cell: dict[str, Any]) -> str:
    return f"{cell['defense']} {cell['strength']}".strip()


def _pairs(root: Path, cell: Cell, attack: str) -> list[Pair]:
    """A few pictures of the cell, from the closest to the farthest."""
    run = Run(root / "cells" / cell.folder)
    spec = run.spec
    scores = run.scores
    names = [attack, f"{attack} naive"]
    own = scores[scores["attack"].isin(names)]
    if own.empty:
        return []
    best = own.groupby("attack")["psnr"].mean().idxmax()
    rows = spread(own[own["attack"] == best].sort_values("psnr", ascending=False), SHOWN)
    return load_pairs(run, jobs_of(run, spec, victims(spec)), scores, rows)


def _cells(markdown: str) -> list[list[str]]:
    """A markdown table as rows of cells, without the line under its head."""
    lines = markdown.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]
