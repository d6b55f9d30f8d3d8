"""Charts of runs."""

from __future__ import annotations

from fedsim.viewer.charts import Series, curves


def test_a_chart_of_one_round_or_none_is_drawn_or_left_out() -> None:
    assert curves([Series(1, "a", [])], "Loss") is None
    one = curves([Series(1, "a", [(1.0, 2.0)]), Series(2, "b", [(1.0, 0.0)])], "Loss")
    assert one is not None
    assert "nan" not in one
    assert one.count('class="curve') == 2
