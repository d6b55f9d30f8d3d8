"""The report of a bench: a frontier whose labels can be read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fedsim.bench.report import frontier, label_places


def cell(strength: str, accuracy: float | None, ssim: float, front: bool) -> dict[str, Any]:
    return {
        "defense": "noise",
        "strength": strength,
        "accuracy": accuracy,
        "ssim": ssim,
        "front": front,
        "doubts": "",
    }


def test_labels_stand_beside_their_points_and_not_on_each_other() -> None:
    points = [(50.0, 0.5), (50.1, 0.5), (50.2, 0.51), (80.0, 0.9)]
    places = label_places(points, ["one", "two", "three", "four"])
    assert places[3][1] == 0.9  # alone: at its own height
    for (x, y), (left, height) in zip(points, places, strict=True):
        assert left > x
        assert abs(height - y) < 0.3
    near = places[:3]
    assert all(abs(a[1] - b[1]) >= 0.033 for a, b in itertools.combinations(near, 2))
    assert label_places([], []) == []


def test_the_frontier_joins_the_cells_that_nothing_beats() -> None:
    cells = [
        cell("weak", 0.9, 0.8, True),
        cell("middle", 0.7, 0.9, False),
        cell("strong", 0.6, 0.1, True),
        cell("untrained", None, 0.5, False),
    ]
    (axes,) = frontier(cells).axes
    strengths, line = axes.lines
    assert strengths.get_xdata().tolist() == pytest.approx([90.0, 70.0, 60.0])
    assert line.get_xdata().tolist() == pytest.approx([60.0, 90.0])
    assert [text.get_text() for text in axes.texts] == [
        "noise weak",
        "noise middle",
        "noise strong",
    ]


def test_a_bench_without_accuracies_has_an_empty_frontier() -> None:
    (axes,) = frontier([cell("weak", None, 0.8, True)]).axes
    assert not axes.lines
    assert not axes.texts
