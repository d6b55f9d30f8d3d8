"""Stealth: how loud a server is to guards, beside what it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedsim.bench import load_bench
from fedsim.bench.measurement import conduct
from fedsim.bench.stealth import COLUMNS, drawing, loudness_in, write_stealth
from tests.conftest import SMALL

ABOUT = {"defense": "fishing", "strength": "0.5", "seed": 0}


def finding(score: float, limit: float = 2.0, **more: Any) -> dict[str, Any]:
    about = {"guard": "g", "score": score, "limit": limit, "tampered": True}
    return {**about, "fired": score > limit, **more}


def summary(*rows: dict[str, Any]) -> dict[str, Any]:
    counts = {"noticed": 1, "tampered": len(rows), "false_alarms": 0, "honest": 0}
    return {"noticed": {"rows": list(rows), "guards": [{"guard": "g", **counts}]}}


def test_loudness_is_the_median_score_over_its_limit_on_tampered_weights() -> None:
    honest = finding(100.0, tampered=False)
    (row,) = loudness_in(summary(finding(1), finding(4), finding(6), honest), ABOUT)
    assert (row["loudness"], row["guard"], row["defense"]) == (2.0, "g", "fishing")
    assert loudness_in({"noticed": None}, ABOUT) == []


@pytest.mark.parametrize(("score", "expected"), [(0.0, 0.0), (1.0, 1e30), (1.8e308, 1e30)])
def test_a_guard_that_takes_nothing_is_silent_or_beyond_its_limit(
    score: float, expected: float
) -> None:
    (row,) = loudness_in(summary(finding(score, 0.0)), ABOUT)
    assert row["loudness"] == expected


def test_nothing_is_drawn_where_nobody_tampered_or_nobody_looked(tmp_path: Path) -> None:
    assert not write_stealth(tmp_path, pd.DataFrame(columns=COLUMNS), pd.DataFrame())
    row = {**ABOUT, "guard": "g", "loudness": None, "noticed": 0, "tampered": 0}
    honest = pd.DataFrame([{**row, "false_alarms": 0, "honest": 3}])
    assert not write_stealth(tmp_path, honest, pd.DataFrame())
    assert not list(tmp_path.iterdir())


def test_the_picture_has_a_line_for_each_guard_and_the_limit() -> None:
    rows = [
        {**ABOUT, "strength": s, "guard": g, "loudness": x, "psnr_worst": y}
        for s, x, y in (("0.5", 50.0, 90.0), ("0.1", 0.2, 12.0))
        for g in ("a", "b")
    ]
    (axes,) = drawing(pd.DataFrame(rows)).axes
    assert [line.get_label() for line in axes.lines][:2] == ["a", "b"]
    assert axes.get_xscale() == "log"


def test_a_bench_of_servers_shows_leak_against_stealth(tmp_path: Path) -> None:
    levers = ["server.manoeuvre.strength=0.05", ["threat=C", "server={}"]]
    content = {
        "threat": "F",
        "server": {"manoeuvre": {"name": "fishing"}},
        "guards": [{"name": "weight_check"}],
        "attacks": [{"name": "patch_solve"}],
        "audit": {"gallery": 0},
        "bench": {"defenses": [{"name": "server", "levers": levers}]},
    }
    overrides = [text for text in SMALL if not text.startswith(("threat", "attacks"))]
    bench = load_bench(content, [*overrides, "train.batch_size=4", "train.rounds=1"])
    table = conduct(bench, tmp_path)
    assert table["strength"].tolist() == ["", "0.05", "C {}"]
    drawn = pd.read_csv(tmp_path / "stealth.csv", dtype={"strength": str})
    assert drawn["strength"].fillna("").tolist() == ["", "0.05"], "the honest one is not tampered"
    assert drawn["loudness"].iloc[0] > drawn["loudness"].iloc[1]
    assert (tmp_path / "stealth.png").is_file()
    assert "How loud the server was" in (tmp_path / "report.html").read_text()
