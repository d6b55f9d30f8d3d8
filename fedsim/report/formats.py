"""Formats: numbers as a reader meets them, rounded, with their unit, an en dash for none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedsim.core.metrics import CEILING_DB, Metric, shown_in

DASH = "–"


def missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def number(value: float | None, digits: int = 2) -> str:
    if missing(value):
        return DASH
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def decibel(value: float | None) -> str:
    if missing(value):
        return DASH
    assert value is not None
    return "160 dB (exact)" if value >= CEILING_DB - 0.05 else f"{value:.1f} dB"


def beside_psnr() -> list[Metric]:
    """The headline metrics but PSNR, which stands first and is known by its unit."""
    return [metric for metric in shown_in("headlines") if metric.name != "psnr"]


def headline(scores: Mapping[str, Any]) -> str:
    """The scores of one picture in a line: 21.3 dB, SSIM 0.45."""
    others = [f"{m.title} {number(scores.get(m.name), m.headline_digits)}" for m in beside_psnr()]
    return ", ".join([decibel(scores["psnr"]), *others])


def listed(words: Iterable[str]) -> str:
    """Words in a row: one, two and three."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def percent(value: float | None) -> str:
    return DASH if missing(value) else f"{100 * float(value or 0):.0f} %"


def small(value: float | None) -> str:
    """A number that may be very small, such as a relative error: 3.2 × 10⁻⁵."""
    if missing(value):
        return DASH
    if not value:
        return "0"
    if abs(value) >= 1e-3:
        return f"{value:.3g}"
    digits, _, power = f"{value:.1e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits} × 10{raised}"


def duration(taken: float | None) -> str:
    if missing(taken):
        return DASH
    assert taken is not None
    if taken < 120:
        return f"{taken:.1f} s"
    minutes = taken / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def seconds(value: float | None) -> str:
    return DASH if missing(value) else "< 0.1" if float(value or 0) < 0.1 else number(value, 1)


def count(amount: int, noun: str) -> str:
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def label(value: float | None) -> str:
    """A class, which a CSV with gaps gives back as a float."""
    return DASH if value is None or missing(float(value)) else str(int(value))


def signed(value: float | None, digits: int = 2) -> str:
    """A difference, with its sign."""
    text = number(value, digits)
    return f"+{text}" if not missing(value) and float(value or 0) > 0 and text != DASH else text


def article(noun: str) -> str:
    """ "a" or "an" before a noun."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def slug(verdict: str) -> str:
    """A verdict as a CSS class."""
    return verdict.lower().replace(" ", "-")


FILTERS: dict[str, Callable[..., str]] = {
    "number": number,
    "decibel": decibel,
    "percent": percent,
    "small": small,
    "duration": duration,
    "seconds": seconds,
    "slug": slug,
    "signed": signed,
    "article": article,
    "label": label,
    "listed": listed,
}
