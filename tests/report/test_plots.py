"""Plots of a report."""

from __future__ import annotations

import pandas as pd

from fedsim.report import plots


def test_plots_survive_gaps() -> None:
    gaps = pd.DataFrame(
        {
            "round": [1.0, 2.0],
            "train_loss": [None, 1.0],
            "test_loss": [None] * 2,
            "test_accuracy": [None] * 2,
        }
    ).astype(float)
    assert len(plots.training(gaps)) == 1
    assert plots.training(gaps.iloc[:0]) == []
    scores = pd.DataFrame({"attack": ["a$_b", "c"], "psnr": [12.0, float("nan")]})
    drawing = plots.strip(scores, ["a$_b", "c"])
    assert drawing is not None
    assert "a$_b" in drawing
    assert "nan" not in drawing
    assert plots.strip(scores.iloc[:0], ["a"]) is None
    assert "var(--accent)" in plots.trace("a", [[(0, 1.0), (1, float("nan")), (2, 1e-4)]])


def test_losses_that_no_axis_can_span_are_left_out() -> None:
    assert "<svg" in plots.trace("wild", [[(0, 1e308), (1, 2.0), (2, -1e308), (3, 1.0)]])
