"""Charts of runs as inline SVG: classes instead of colours, so that the page's style decides.

Drawn by hand, not by matplotlib: a page that is polled draws every second, from many threads. Runs
differ by colour, dash and mark, so that no reader depends on colour alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 40
LARGEST, SMALLEST = 1e15, 1e-15  # values beyond, and differences below, are not drawn
MARKS = {  # a path around the origin for each run
    1: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    2: "M-3.2 -3.2h6.4v6.4h-6.4z",
    3: "M0 -4.6L4.3 3.2H-4.3z",
    4: "M0 -4.7L4.7 0L0 4.7L-4.7 0z",
}


@dataclass(frozen=True)
class Series:
    """One run's values over the rounds; ``number`` (from 1) is the run's place on the page."""

    number: int
    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Interval:
    """A mean and the interval around it, of one run."""

    number: int
    name: str
    mean: float
    low: float
    high: float


def curves(series: list[Series], title: str, *, top: float | None = None) -> Markup | None:
    """Lines over the rounds; None where there is nothing to draw."""
    series = [replace(one, points=_drawable(one.points)) for one in series]
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low, high = (0.0, top) if top is not None else (min(0.0, *ys), max(ys))
    across, up = _ticks(min(xs), max(xs), 6, whole=True), _ticks(low, high, 5)
    low, high = min(low, up[0]), max(high, up[-1])
    x_low, x_high = min(xs), max(xs)

    def x_at(x: float) -> float:
        span = x_high - x_low
        share = (x - x_low) / span if span else 0.5
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in up:
        y = y_at(value)
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    for value in across:
        parts.append(_text(x_at(value), HEIGHT - BOTTOM + 18, f"{value:g}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "round", "middle"))
    for one in drawn:
        at = [(x_at(x), y_at(y)) for x, y in one.points]
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts.append(f'<path class="curve run-{one.number}" d="{line}"/>')
        marked = at if len(at) <= 25 else [at[0], at[-1]]
        parts += [_mark(one.number, x, y) for x, y in marked]
    values = "; ".join(
        f"{one.name} from {one.points[0][1]:.3g} to {one.points[-1][1]:.3g}" for one in drawn
    )
    return _svg(parts, HEIGHT, f"{title} over the rounds: {values}")


def _drawable(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if max(map(abs, point)) < LARGEST]


def intervals(
    groups: list[tuple[str, list[Interval]]], title: str, unit: str, line: float, top: float
) -> Markup | None:
    """A row for each run under each attack: its mean, and the interval around it.

    The scale ends at ``top`` where some means lie far beyond; those stand at its end, in numbers.
    """
    groups = [(name, rows) for name, rows in groups if rows]
    if not groups:
        return None
    row, head, left = 20, 26, 12
    height = TOP + sum(head + row * len(rows) for _, rows in groups) + BOTTOM
    ticks = _ticks(0.0, top, 6)
    edge = WIDTH - RIGHT - 52  # room for the numbers of what lies beyond

    def x_at(x: float) -> float:
        return left + min(max(0.0, x) / top, 1.0) * (edge - left)

    floor = height - BOTTOM + 4
    parts = []
    for value in ticks:
        parts.append(f'<path class="rule" d="M{x_at(value):.1f} {TOP}V{floor}"/>')
        parts.append(_text(x_at(value), floor + 16, f"{value:g}", "middle"))
    parts.append(f'<path class="limit" d="M{x_at(line):.1f} {TOP}V{floor}"/>')
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 3, unit, "middle"))
    y, values = float(TOP), []
    for name, rows in groups:
        parts.append(_text(left + 3, y + 17, name, "start", "name"))
        y += head
        for one in rows:
            middle = y + row / 2
            beyond = one.mean > top
            x = edge + 12.0 if beyond else x_at(one.mean)
            ends = f"M{x_at(one.low):.1f} {middle:.1f}H{x if beyond else x_at(one.high):.1f}"
            if one.low < min(one.high, top):
                parts.append(f'<path class="span run-{one.number}" d="{ends}"/>')
            parts.append(_mark(one.number, x, middle))
            if beyond:
                parts.append(_text(x + 10, middle + 4, f"{one.mean:.0f}", "start"))
            values.append(f"{name} in {one.name} {one.mean:.3g} ({one.low:.3g} to {one.high:.3g})")
            y += row
    return _svg(parts, int(height), f"{title}: {'; '.join(values)}")


def mark(number: int) -> Markup:
    """The mark of a run, for legends; it says nothing that the words beside it do not."""
    shape = f'<path class="curve run-{number}" d="M0 7H26"/>{_mark(number, 13, 7)}'
    return Markup(f'<svg class="key" viewBox="0 0 26 14" aria-hidden="true">{shape}</svg>')


def _mark(number: int, x: float, y: float) -> str:
    shape = MARKS[number]
    return f'<path class="mark run-{number}" d="{shape}" transform="translate({x:.1f} {y:.1f})"/>'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> str:
    text = escape(words)
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(parts: list[str], height: int, description: str) -> Markup:
    text = escape(description)
    opening = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text}">'
        f"<title>{text}</title>"
    )
    return Markup(opening + "".join(parts) + "</svg>")


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers that cover a range; with ``whole``, integers inside it."""
    rough = (high - low) / most
    if rough < SMALLEST:
        return [low] if whole else [low, low + 1.0]
    power = 10 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
        first, last = math.ceil(low / step), math.floor(high / step)
        return [n * step for n in range(first, last + 1)]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]
