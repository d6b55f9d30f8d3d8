"""Report of a benchmark: the frontier, the table, and what each cell's pictures look like."""

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

from fedsim.bench.cells import UNDEFENDED
from fedsim.bench.doubts import legend_of, marks_of
from fedsim.bench.suites import names_of, suite_rows
from fedsim.campaign.plan import jobs_of, victims
from fedsim.campaign.suites import NAIVE
from fedsim.core.files import write_atomically
from fedsim.core.run import Run, paths
from fedsim.core.text import encoded
from fedsim.report import HERE, environment
from fedsim.report.formats import beside_psnr
from fedsim.report.pictures import Pair, load_pairs, spread

if TYPE_CHECKING:
    from fedsim.bench.cells import Bench, Cell

SHOWN = 4  # pictures per cell
INK, MUTED, FRONT = "#1c2128", "#8a929b", "#a8261b"


@dataclass(frozen=True)
class Row:
    """One cell as the page shows it."""

    label: str
    attack: str
    words: str
    front: bool
    pairs: list[Pair]
    marks: str = ""  # what is in doubt


def write_bench_report(bench: Bench, root: Path, table: pd.DataFrame, markdown: str) -> None:
    """``frontier.png``, ``frontier.svg`` and ``report.html``."""
    from fedsim.bench.table import by_cell

    cells = by_cell(table)
    figure = frontier(cells)
    for suffix in ("png", "svg"):
        image = io.BytesIO()
        bare = dict.fromkeys(("Date", "Creator", "Format", "Type")) if suffix == "svg" else None
        figure.savefig(image, format=suffix, dpi=160, metadata=bare)
        write_atomically(root / f"frontier.{suffix}", image.getvalue())
    by_label = {cell.label: cell for cell in reversed(list(bench.cells()))}
    rows = []
    for entry in cells:
        label, attack = _label(entry), entry["attack"]
        words = _leaked(entry)
        if entry["accuracy"] is not None:
            words += f", accuracy {100 * entry['accuracy']:.0f} %"
        pairs = _pairs(root, by_label[label], attack)
        rows.append(Row(label, attack, words, entry["front"], pairs, marks_of(entry["doubts"])))
    svg, loud = (root / "frontier.svg").read_text(), root / "stealth.svg"
    stealth = loud.read_text() if loud.is_file() else ""
    page = (
        environment(Path(__file__).parent)
        .get_template("bench.html")
        .render(
            spec=bench.spec,
            section=bench.section,
            rows=rows,
            table=_cells(markdown),
            legend=legend_of(table),
            frontier=Markup(svg[svg.index("<svg") :]),
            stealth=Markup(stealth[stealth.index("<svg") :]) if stealth else None,
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        )
    )
    write_atomically(root / paths.REPORT, encoded(page.lstrip()))


def _leaked(entry: dict[str, Any]) -> str:
    if entry["psnr"] is None:
        return "no result"
    leakage = [f"{m.title} {entry[m.name]:.{m.headline_digits}f}" for m in beside_psnr()]
    recovered = f"{100 * entry['recovered']:.0f} % recovered"
    return ", ".join([f"{entry['psnr']:.1f} dB", *leakage, recovered])


def frontier(cells: list[dict[str, Any]]) -> Figure:
    """Leakage of the strongest attack against accuracy; the cells nothing beats are joined."""
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
    known = [c for c in cells if c["accuracy"] is not None and c["ssim"] is not None]
    points = [(100 * cell["accuracy"], cell["ssim"]) for cell in known]
    for cell, at in zip(known, points, strict=True):
        axes.scatter(*at, color=FRONT if cell["front"] else MUTED, s=26, zorder=3)
    for path in _paths(known):
        axes.plot(*zip(*path, strict=True), color="#d5d9de", lw=0.9, zorder=1)
    places = label_places(points, [_marked(cell) for cell in known])
    for cell, at, place in zip(known, points, places, strict=True):
        axes.annotate(
            _marked(cell),
            at,
            xytext=place,
            fontsize=6.5,
            va="center",
            color=INK if cell["front"] else "#58616b",
            arrowprops={"arrowstyle": "-", "color": "#c9cdd2", "lw": 0.5, "shrinkB": 2},
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
    axes.margins(x=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _paths(cells: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """The strengths of each defense, mild first, as the points that a line goes through; from no
    defense on."""
    start = [(100 * c["accuracy"], c["ssim"]) for c in cells if c["defense"] == UNDEFENDED][:1]
    by_defense: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        if cell["defense"] != UNDEFENDED:
            at = (100 * cell["accuracy"], cell["ssim"])
            by_defense.setdefault(cell["defense"], list(start)).append(at)
    return [path for path in by_defense.values() if len(path) > 1]


def label_places(points: list[tuple[float, float]], labels: list[str]) -> list[tuple[float, float]]:
    """Where to write each label: beside its point, moved up or down until it is free."""
    if not points:
        return []
    across = [x for x, _ in points]
    letter, height = 0.0085 * max(max(across) - min(across), 1.0) * 1.5, 0.034
    taken = [(x - letter, x + letter, y) for x, y in points]  # the points themselves
    places: list[tuple[float, float]] = []
    for (x, y), label in sorted(zip(points, labels, strict=True), key=lambda p: -p[0][1]):
        left, right = x + 2 * letter, x + (2 + len(label)) * letter
        shifts = [k * height for n in range(20) for k in ((n,) if n == 0 else (-n, n))]
        free = [
            s
            for s in shifts
            if -0.01 <= y + s <= 1.04
            and all(b < left or a > right or abs(y + s - at) >= height for a, b, at in taken)
        ]
        place = (left, y + (free[0] if free else 0.0))
        taken.append((left, right, place[1]))
        places.append(place)
    order = sorted(range(len(points)), key=lambda i: -points[i][1])
    by_index = dict(zip(order, places, strict=True))
    return [by_index[i] for i in range(len(points))]


def _label(cell: dict[str, Any]) -> str:
    return f"{cell['defense']} {cell['strength']}".strip()


def _marked(cell: dict[str, Any]) -> str:
    return f"{_label(cell)} {marks_of(cell['doubts'])}".strip()


def _pairs(root: Path, cell: Cell, attack: str) -> list[Pair]:
    """A few pictures of the cell, from the closest to the farthest."""
    run = Run(root / "cells" / cell.folder)
    spec = run.spec
    scores = run.scores
    names = [attack, f"{attack}{NAIVE}"]
    suite = run.summary.get("suite")
    if suite and attack in names_of(suite):
        chosen = suite_rows(run, suite)
        chosen = chosen[chosen["attack"] == attack].sort_values("psnr", ascending=False)
        rows = spread(chosen.assign(attack=chosen["member"]), SHOWN)
        return load_pairs(run, jobs_of(run, spec, victims(spec)), scores, rows)
    attacked = scores[scores["attack"].isin(names)]
    if attacked.empty:
        return []
    best = attacked.groupby("attack")["psnr"].mean().idxmax()
    rows = spread(attacked[attacked["attack"] == best].sort_values("psnr", ascending=False), SHOWN)
    return load_pairs(run, jobs_of(run, spec, victims(spec)), scores, rows)


def _cells(markdown: str) -> list[list[str]]:
    """A markdown table as rows of cells, without the line under its head."""
    lines = markdown.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]
