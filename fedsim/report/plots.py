"""Plots as inline SVG. Their colours are the page's variables: they follow dark mode and print."""

from __future__ import annotations

import io
import math
import re
from html import escape
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fedsim.core.metrics import METRICS
from fedsim.report.content import Trace
from fedsim.scoring.recovery import RECOVERED_DB

# Colours to draw in; in the SVG, the variables of style.css take their place.
INK, MUTED, LINE, ACCENT, SECOND = "#010203", "#020304", "#030405", "#040506", "#050607"
PAPER = "#060708"
VARIABLES = {
    **{INK: "ink", MUTED: "muted", LINE: "line"},
    **{ACCENT: "accent", SECOND: "second", PAPER: "paper"},
}

PSNR = METRICS["psnr"]
WIDTH = 400  # CSS pixels: readable when a phone shrinks it a little
MOST_SHOWN = 1e100  # the largest loss that is drawn
LINES_SHOWN = 40
RASTER_ABOVE = 3000  # dots
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def training(rounds: pd.DataFrame) -> list[Markup]:
    """Test accuracy and losses per round; a curve without a value is left out."""
    drawn = []
    accuracy = rounds[["round", "test_accuracy"]].dropna()
    if len(accuracy):
        figure, axes = _figure(230, "accuracy")
        axes.plot(accuracy["round"], 100 * accuracy["test_accuracy"], "o-", color=ACCENT, ms=4)
        axes.set(ylim=(0, 100), xlabel="round")
        _name(axes, "test accuracy, %")
        first, last = accuracy["test_accuracy"].iloc[[0, -1]]
        drawn.append(
            _svg(
                figure,
                f"Test accuracy over {len(accuracy)} rounds: from {first:.0%} to {last:.0%}",
            )
        )
    losses = {"test loss": "test_loss", "training loss": "train_loss"}
    tables = {name: rounds[["round", key]].dropna() for name, key in losses.items()}
    tables = {name: table for name, table in tables.items() if len(table)}
    if tables:
        figure, axes = _figure(230, "loss")
        for name, table in tables.items():
            colour, line = (ACCENT, "o-") if name == "test loss" else (SECOND, "o--")
            axes.plot(table["round"], table.iloc[:, 1], line, color=colour, ms=4, label=name)
        axes.set(xlabel="round")
        _name(axes, " and ".join(tables))
        if len(tables) > 1:
            axes.legend(frameon=False, labelcolor=MUTED, fontsize=10)
        drawn.append(_svg(figure, f"{' and '.join(tables)} over the rounds"))
    return drawn


def strip(scores: pd.DataFrame, labels: list[str], baseline: str | None = None) -> Markup | None:
    """A dot for each image, a row for each attack, and the line from which a picture is clear."""
    scores = scores.dropna(subset=["psnr"])
    present = [label for label in labels if (scores["attack"] == label).any()]
    if not present:
        return None
    figure, axes = _figure(70 + 58 * len(present), "strip")
    coin = np.random.default_rng(0)  # where a dot lies across its row means nothing
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
    rasterised = len(scores) > RASTER_ABOVE
    for row, label in enumerate(present):
        values = scores.loc[scores["attack"] == label, "psnr"].to_numpy(float)
        colour = MUTED if label == baseline else ACCENT
        scatter = coin.uniform(-0.13, 0.13, len(values)) if len(values) > 1 else 0.0
        axes.scatter(
            values,
            row + np.broadcast_to(scatter, len(values)),
            s=20 if len(values) <= 100 else 9,
            color=colour,
            alpha=0.55 if len(values) <= 100 else 0.35,
            linewidths=0,
            rasterized=rasterised,
            clip_on=False,
        )
        axes.plot([values.mean()] * 2, [row - 0.19, row + 0.19], color=INK, lw=1.6)
        axes.text(0, row - 0.3, label, color=INK, va="bottom", parse_math=False, bbox=ground)
    top = max(40.0, float(scores["psnr"].max()) * 1.03)
    axes.axvline(RECOVERED_DB, color=INK, lw=1, ls=(0, (4, 3)), zorder=1.5)
    axes.text(RECOVERED_DB, -0.85, f"{RECOVERED_DB:.0f} dB", color=MUTED, ha="center", fontsize=10)
    axes.set(xlim=(0, top), ylim=(len(present) - 0.65, -0.8), xlabel=PSNR.heading)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    words = [
        f"{label} {scores.loc[scores['attack'] == label, 'psnr'].mean():.1f} dB on average"
        for label in present
    ]
    return _svg(figure, f"PSNR of each image by attack: {'; '.join(words)}")


def over_rounds(rows: list[dict[str, Any]], baseline: str | None = None) -> Markup | None:
    """Leakage as training goes on: mean PSNR per round with its interval, accuracy beside it."""
    rounds = sorted({row["round"] for row in rows})
    if len(rounds) < 2:
        return None
    figure, axes = _figure(250, "over rounds")
    labels = list(dict.fromkeys(row["attack"] for row in rows))
    shades = [ACCENT, SECOND, INK]
    words = []
    for at, label in enumerate(labels):
        points = sorted((r for r in rows if r["attack"] == label), key=lambda r: r["round"])
        colour = MUTED if label == baseline else shades[at % len(shades)]
        line = ":" if label == baseline else ("-", "--", "-.")[at // len(shades) % 3]
        places = [row["round"] for row in points]
        means = [row["psnr"]["mean"] for row in points]
        axes.plot(places, means, f"o{line}", color=colour, ms=4, label=label)
        axes.fill_between(
            places,
            [row["psnr"]["low"] for row in points],
            [row["psnr"]["high"] for row in points],
            color=colour,
            alpha=0.15,
            lw=0,
        )
        words.append(f"{label} from {means[0]:.1f} to {means[-1]:.1f} dB")
    known = {row["round"]: row["accuracy_before"] for row in rows}
    accuracy = [(r, 100 * a) for r, a in sorted(known.items()) if a is not None]
    axes.set(xlabel="round")
    right = "; right: accuracy of the model sent, %" if accuracy else ""
    _name(axes, f"mean {PSNR.heading}{right}")
    if accuracy:
        beside = axes.twinx()
        beside.plot(*zip(*accuracy, strict=True), "s:", color=MUTED, ms=4, lw=1, zorder=0)
        beside.set_ylim(0, 100)
        beside.tick_params(length=3, labelcolor=MUTED, color=LINE)
        beside.spines[["top", "left"]].set_visible(False)
        beside.spines["right"].set_color(LINE)
        beside.grid(visible=False)
    axes.legend(frameon=False, labelcolor=MUTED, fontsize=10)
    return _svg(figure, f"Leakage over rounds {rounds[0]} to {rounds[-1]}: {'; '.join(words)}")


def roc(label: str, curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> Markup:
    """True against false positive rates, a line for each named curve; the diagonal is chance."""
    figure, axes = _figure(330, f"roc {label}")
    axes.plot([0, 100], [0, 100], color=LINE, lw=1.2)
    shades = [(ACCENT, "-"), (SECOND, "-"), (MUTED, "--")]
    for at, (name, (false, true)) in enumerate(curves.items()):
        colour, line = shades[at % len(shades)]
        axes.step(100 * false, 100 * true, line, color=colour, lw=1.6, where="post", label=name)
    axes.set(xlim=(0, 100), ylim=(0, 101), xlabel="others taken for members, %", aspect="equal")
    _name(axes, f"{label}: members told, %")
    axes.legend(frameon=False, labelcolor=MUTED, fontsize=9, loc="lower right")
    return _svg(figure, f"ROC curve of {label}: {'; '.join(curves)}")


def trace(label: str, traces: list[Trace]) -> Markup:
    """The attack's own loss over its steps, one line per job."""
    figure, axes = _figure(230, f"trace {label}")
    shown = traces[:: math.ceil(len(traces) / LINES_SHOWN)]
    values = []
    for line in shown:
        # What no axis can span is left out, as what is not finite is.
        steps, losses = zip(*line, strict=True)
        losses = tuple(loss if abs(loss) < MOST_SHOWN else math.nan for loss in losses)
        axes.plot(steps, losses, color=ACCENT, lw=1.1, alpha=max(0.25, 1 / len(shown) ** 0.5))
        values += [loss for loss in losses if math.isfinite(loss)]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="step")
    _name(axes, f"{label}: loss")
    return _svg(figure, f"Loss of {label} over its steps, {len(shown)} of {len(traces)} jobs")


def _figure(height: int, salt: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
    figure.set_label(salt)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(length=3)
    return figure, axes


def _name(axes: Axes, words: str) -> None:
    """What the y axis shows, above it: sideways text is hard to read."""
    axes.set_title(words, loc="left", fontsize=11, parse_math=False)


def _svg(figure: Figure, description: str) -> Markup:
    """The figure as an element of the page: its colours, its font, no address of any other site."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": str(figure.get_label())}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.S)
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.S)
    used = set(re.findall(r"""(?:url\(#|href="#)([^")]+)""", drawing))
    drawing = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", drawing)
    drawing = drawing.replace("xlink:href", "href")
    for colour, name in VARIABLES.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    box = re.search(r'viewBox="[^"]*"', drawing)
    text = escape(description)
    opening = f'<svg class="plot" {box[0] if box else ""} role="img" aria-label="{text}">'
    return Markup(opening + f"<title>{text}</title>" + drawing[drawing.index(">") + 1 :])
