"""ROC: areas, intervals and rates against known values."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from fedsim.scoring.roc import curve, placements, told_apart


def table(scores: list[float], client: int = 0, trial: int = 0, start: int = 0) -> pd.DataFrame:
    places = range(start, start + len(scores))
    return pd.DataFrame(
        {"round": 1, "client": client, "trial": trial, "image": list(places), "score": scores}
    )


def test_placements_are_shares_of_pairs_and_ties_count_half() -> None:
    assert placements(np.array([3.0, 1.0, 2.0]), np.array([0.0, 2.0])).tolist() == [1, 0.5, 0.75]


def test_the_area_is_the_share_of_pairs_in_which_the_member_is_ahead() -> None:
    found = told_apart(table([4, 3, 1]), table([2, 0], start=5), "score")
    assert found is not None
    assert math.isclose(found["auc"], 5 / 6)
    assert (found["members"], found["others"]) == (3, 2)
    assert found["tpr"] == pytest.approx(2 / 3)  # above all others
    assert not found["resolved"]
    assert found["fpr"] == 0


def test_one_update_has_the_interval_of_delong() -> None:
    members, others = [0.9, 0.8, 0.4, 0.35, 0.7], [0.6, 0.5, 0.3, 0.2]
    found = told_apart(table(members), table(others, start=9), "score")
    assert found is not None
    above = [[float(m > o) for o in others] for m in members]
    ours, theirs = np.mean(above, 1), np.mean(above, 0)
    error = math.sqrt(ours.var(ddof=1) / 5 + theirs.var(ddof=1) / 4)
    assert found["low"] == pytest.approx(found["auc"] - 1.96 * error, abs=1e-3)
    assert found["high"] == 1.0  # no area is above one


def test_pairs_are_made_within_an_update_so_that_no_scale_decides() -> None:
    members = pd.concat([table([12, 11]), table([2, 1], client=1)])
    others = pd.concat([table([10, 9], start=5), table([0, -1], client=1, start=5)])
    found = told_apart(members, others, "score")
    assert found is not None
    assert found["auc"] == 1.0
    assert found["tpr"] == 0.5  # one threshold for all


def test_an_area_without_an_exception_is_not_sure() -> None:
    found = told_apart(table([5, 6, 7, 8]), table([1, 2, 3, 4], start=9), "score")
    assert found is not None
    assert (found["auc"], found["high"]) == (1.0, 1.0)
    assert found["low"] == pytest.approx(0.025 ** (1 / 4))


@pytest.mark.slow
def test_intervals_hold_a_half_as_often_as_they_say_where_nothing_is_told() -> None:
    coin, held = np.random.default_rng(3), 0
    for _ in range(200):
        sides = [
            pd.concat([table(coin.normal(size=8).tolist(), c, start=s) for c in range(5)])
            for s in (0, 50)
        ]
        found = told_apart(*sides, "score")
        assert found is not None
        held += found["low"] <= 0.5 <= found["high"]
    assert held >= 186  # 190 of 200, give or take


def test_more_trials_make_no_interval_narrower() -> None:
    members, others = [0.9, 0.8, 0.4, 0.35, 0.7], [0.6, 0.5, 0.3, 0.2]
    once = told_apart(table(members), table(others, start=9), "score")
    sides = (
        pd.concat([table(side, trial=trial, start=start) for trial in range(3)])
        for side, start in ((members, 0), (others, 9))
    )
    again = told_apart(*sides, "score")
    assert again is not None
    assert once is not None
    assert {k: pytest.approx(v) for k, v in once.items()} == again


def test_with_a_hundred_others_one_percent_is_one_of_them() -> None:
    others = table([float(x) for x in range(100)], start=500)
    found = told_apart(table([98.5, 97.5, 200.0, 0.5]), others, "score")
    assert found is not None
    assert (found["resolved"], found["fpr"]) == (True, 0.01)
    assert found["tpr"] == 0.5  # above 98, one of a hundred lies higher


def test_nothing_is_told_of_a_side_that_is_lacking() -> None:
    assert told_apart(table([1.0]), table([math.nan], start=4), "score") is None
    assert told_apart(table([1.0]), table([2.0], client=3), "score") is None


def test_a_curve_goes_from_corner_to_corner_and_has_the_area() -> None:
    coin = np.random.default_rng(0)
    members, others = coin.normal(1, 1, 40).round(1), coin.normal(0, 1, 50).round(1)
    false, true = curve(members, others)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    area = float(((true[1:] + true[:-1]) / 2 * np.diff(false)).sum())
    assert area == pytest.approx(placements(members, others).mean())
