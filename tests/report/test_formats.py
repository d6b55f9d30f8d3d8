"""Numbers as a reader wants them."""

from __future__ import annotations

import pytest

from fedsim.report import formats


@pytest.mark.parametrize(
    ("filter_", "value", "text"),
    [
        ("number", None, "–"),
        ("number", float("nan"), "–"),
        ("number", -0.001, "0.00"),
        ("number", -0.25, "−0.25"),
        ("decibel", 160.0, "160 dB (exact)"),
        ("decibel", 31.26, "31.3 dB"),
        ("percent", 0.0, "0 %"),
        ("small", 3.2e-5, "3.2 × 10⁻⁵"),
        ("small", 0.0, "0"),
        ("seconds", 0.01, "< 0.1"),
        ("duration", 7200.0, "2.0 h"),
        ("label", 3.0, "3"),
        ("label", float("nan"), "–"),
    ],
)
def test_numbers_read_well(filter_: str, value: float | None, text: str) -> None:
    assert formats.FILTERS[filter_](value) == text
