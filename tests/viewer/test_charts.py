"""Charts of runs."""

from __future__ import annotations

import re

import pytest

from fedsim.viewer.charts import Series, curves


def test_a_chart_of_one_round_or_none_is_drawn_or_left_out() -> None:
    assert curves([Series(1, "a", [])], "Loss") is None
    one = curves([Series(1, "a", [(1.0, 2.0)]), Series(2, "b", [(1.0, 0.0)])], "Loss")
    assert one is not None
    assert "nan" not in one
    assert one.count('class="curve') == 2


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 1e308), (2.0, -1e308)],
        [(1.0, 5e-324), (2.0, 0.0)],
        [(1e308, 1.0), (-1e308, 2.0)],
        [(0.2, 1.0), (0.4, 2.0)],
        [(1.0, 1.0), (1.0, 1.0 + 1e-16)],
    ],
)
def test_numbers_that_nobody_trains_to_are_drawn_or_left_out(
    points: list[tuple[float, float]],
) -> None:
    drawn = curves([Series(1, "a", points), Series(2, "b", [(1.0, 0.5)])], "Loss")
    assert drawn is not None
    assert not re.search(r"\b(nan|inf)\b", drawn)
