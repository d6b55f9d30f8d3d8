"""Statistics: each on scores whose answer is known."""

from __future__ import annotations

import pandas as pd
import pytest

from fedsim.core.attack import BASELINE
from fedsim.core.spec import Spec
from fedsim.scoring.scores import columns
from fedsim.scoring.statistics import (
    above_chance,
    bootstrap,
    compare,
    describe,
    over_rounds,
    population,
    proportion,
)
from fedsim.scoring.verdict import summarise
from tests.scoring.conftest import table


def scores(rows: list[tuple[str, int, int, float]], **extra: object) -> pd.DataFrame:
    """Attack, round, client, PSNR."""
    table = [
        {
            **dict.fromkeys(columns()),
            **{"attack": attack, "round": round_, "client": client, "trial": 0, "image": 0},
            **{"psnr": psnr, "ssim": psnr / 100, "canary": 0.0, "seconds": 1.0},
            **extra,
        }
        for attack, round_, client, psnr in rows
    ]
    return pd.DataFrame(table, columns=columns())


def test_a_description_has_the_worst_case_and_where_most_lie() -> None:
    table = scores([("a", 1, client, float(client)) for client in range(11)])
    told = describe(table, "psnr", 0)
    assert (told["mean"], told["worst_case"], told["typical"], told["exposed"]) == (5, 10, 5, 9)
    assert told["low"] < 5 < told["high"]
    assert describe(table, "lpips", 0)["mean"] is None
    lower = describe(table.assign(lpips=table["psnr"]), "lpips", 0)
    assert (lower["worst_case"], lower["exposed"]) == (0, 1)  # closer is lower


def test_a_rate_has_the_exact_binomial_interval() -> None:
    none, half = proportion(0, 10), proportion(5, 10)
    assert (none["rate"], none["low"]) == (0, 0)
    assert none["high"] == pytest.approx(1 - 0.025**0.1)
    assert half["low"] < 0.5 < half["high"]
    assert above_chance(1, 1, 0.01) == pytest.approx(0.01)
    assert above_chance(0, 5, 0.01) == 1


def test_attacks_are_compared_on_the_same_pictures() -> None:
    rows = [("a", 1, c, 20.0 + c) for c in range(4)] + [("b", 1, c, 10.0 + c) for c in range(3)]
    (pair,) = compare(scores(rows), ["a", "b", "never ran"], 0)
    assert (pair["first"], pair["second"], pair["pictures"]) == ("a", "b", 3)
    assert pair["psnr"] == {"mean": 10, "low": 10, "high": 10}


def test_the_most_exposed_client_comes_first() -> None:
    rows = [("a", 1, 0, 12.0), ("b", 1, 0, 15.0), ("a", 1, 1, 40.0), (BASELINE, 1, 1, 11.0)]
    first, second = population(scores(rows), BASELINE)
    assert (first["client"], first["attack"], first["psnr"], first["guess"]) == (1, "a", 40, 11)
    assert (second["client"], second["attack"], second["guess"]) == (0, "b", None)


def test_leakage_over_rounds_stands_beside_the_accuracy_the_clients_started_from() -> None:
    rounds = pd.DataFrame({"round": [1, 2], "test_accuracy": [0.3, 0.6]})
    table = scores([("a", 1, 0, 30.0), ("a", 2, 0, 20.0)])
    first, second = over_rounds(table, rounds, 0)
    assert (first["round"], first["psnr"]["mean"], first["accuracy_before"]) == (1, 30, None)
    assert (second["round"], second["psnr"]["mean"], second["accuracy_before"]) == (2, 20, 0.3)


@pytest.mark.parametrize(("identified", "verdict"), [(1, "PARTIAL"), (0, "NOT RECOVERED")])
def test_pictures_told_from_a_gallery_are_a_partial_leak(identified: int, verdict: str) -> None:
    rows = [(name, 1, c, 12.0) for name in ("a", BASELINE) for c in range(4)]
    table = scores(rows, identified=identified)
    about = {"space": "pixels", "gallery": 99, "chance": 0.01}
    (entry, _) = summarise(table, Spec(), ["a", BASELINE], {}, [], about)
    assert entry["verdict"] == verdict
    assert entry["identification"]["rate"] == identified
    assert entry["identification"]["of"] == 4


def test_the_interval_covers_the_mean_and_narrows_with_victims() -> None:
    few = table([10, 20, 30], [])
    many = table([10, 20, 30] * 20, [])
    (low, high), (inner_low, inner_high) = (bootstrap(t, "psnr", 0) for t in (few, many))
    assert low <= 20 <= high
    assert low < inner_low < 20 < inner_high < high
