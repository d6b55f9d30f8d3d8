"""Statistics: each on scores whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from fedsim.core.attack import BASELINE
from fedsim.core.spec import Spec
from fedsim.scoring.scores import columns
from fedsim.scoring.statistics import (
    compare,
    count_groups,
    count_pictures,
    describe,
    interval,
    label_accuracy,
    label_chance,
    mean_interval,
    over_rounds,
    population,
    proportion,
    rate,
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
    told = describe(table, "psnr")
    assert (told["mean"], told["worst_case"], told["typical"], told["exposed"]) == (5, 10, 5, 9)
    assert told["low"] < 5 < told["high"]
    assert describe(table, "lpips")["mean"] is None
    lower = describe(table.assign(lpips=table["psnr"]), "lpips")
    assert (lower["worst_case"], lower["exposed"]) == (0, 1)  # closer is lower


def test_a_rate_has_the_exact_binomial_interval() -> None:
    none, half = proportion(0, 10), proportion(5, 10)
    assert (none["rate"], none["low"]) == (0, 0)
    assert none["high"] == pytest.approx(1 - 0.025**0.1)
    assert half["low"] < 0.5 < half["high"]
    exact = binomtest(3, 10).proportion_ci(method="exact")
    assert proportion(3, 10)["low"] == pytest.approx(exact.low)
    assert proportion(3, 10)["high"] == pytest.approx(exact.high)


def test_attacks_are_compared_on_the_same_pictures() -> None:
    rows = [("a", 1, c, 20.0 + c) for c in range(4)] + [("b", 1, c, 10.0 + c) for c in range(3)]
    (pair,) = compare(scores(rows), ["a", "b", "never ran"])
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
    first, second = over_rounds(table, rounds)
    assert (first["round"], first["psnr"]["mean"], first["accuracy_before"]) == (1, 30, None)
    assert (second["round"], second["psnr"]["mean"], second["accuracy_before"]) == (2, 20, 0.3)


@pytest.mark.parametrize(("by_chance", "verdict"), [(1e-4, "PARTIAL"), (2e-3, "NOT RECOVERED")])
def test_pictures_told_from_a_gallery_are_a_partial_leak(by_chance: float, verdict: str) -> None:
    rows = [(name, 1, c, 12.0) for name in ("a", BASELINE) for c in range(4)]
    table = scores(rows, identified=1)
    about = {"space": "pixels", "gallery": 99, "chance": 0.01, "by_chance": by_chance}
    (entry, guess) = summarise(table, Spec(), ["a", BASELINE], {}, [], {"a": about})
    assert entry["verdict"] == verdict
    assert entry["identification"]["rate"] == 1
    assert entry["identification"]["of"] == 4
    assert entry["identification"]["chance"] == 0.01
    assert guess["identification"] is None


def test_the_interval_covers_the_mean_and_narrows_with_victims() -> None:
    few = table([10, 20, 30], [])
    many = table([10, 20, 30] * 20, [])
    (low, high), (inner_low, inner_high) = (interval(t, "psnr") for t in (few, many))
    assert low <= 20 <= high
    assert low < inner_low < 20 < inner_high < high


@pytest.mark.parametrize("victims", [3, 8])
def test_intervals_cover_the_mean_as_often_as_they_say(victims: int) -> None:
    coin, met = np.random.default_rng(1), 0
    for _ in range(2000):
        low, high = mean_interval(list(coin.normal(size=(victims, 1))))
        met += low <= 0 <= high
    assert 0.935 < met / 2000 < 0.965


def test_an_interval_of_unequal_groups_is_that_of_a_ratio() -> None:
    groups = [np.array([1.0, 2.0, 3.0]), np.array([5.0]), np.array([2.0, 2.0])]
    low, high = mean_interval(groups)
    left_out = []  # the jackknife, which agrees to first order
    for at in range(3):
        rest = np.concatenate([g for i, g in enumerate(groups) if i != at])
        left_out.append(rest.mean())
    jackknife = np.sqrt(2 / 3 * np.square(np.array(left_out) - np.mean(left_out)).sum())
    assert (low + high) / 2 == pytest.approx(2.5)
    assert (high - low) / 2 == pytest.approx(4.3027 * jackknife, rel=0.25)


def test_one_victim_has_no_interval() -> None:
    assert mean_interval([np.array([1.0, 3.0])]) == (2.0, 2.0)


def batches(victims: int, images: int, seed: int = 0) -> pd.DataFrame:
    """Victims with several pictures each; labels and identification as it happens."""
    coin = np.random.default_rng(seed)
    rows = []
    for client in range(victims):
        ease = coin.random()
        for image in range(images):
            right = int(coin.random() < ease)
            rows.append(
                {
                    **dict.fromkeys(columns()),
                    **{"attack": "a", "round": 1, "client": client, "trial": 0, "image": image},
                    **{"psnr": 10 + 10 * coin.random(), "ssim": coin.random(), "canary": 0.0},
                    **{"label_true": 1, "label_recovered": right, "identified": right},
                    **{"seconds": 1.0, "picture": images * client + image},
                }
            )
    return pd.DataFrame(rows, columns=columns())


def everything(table: pd.DataFrame) -> list[Any]:
    """Whatever the statistics say of a table and an attack `b` that is everywhere 1 dB better."""
    better = table.assign(attack="b", psnr=table["psnr"] + 1)
    both = pd.concat([table, better], ignore_index=True)
    return [
        interval(table, "psnr"),
        describe(table, "psnr"),
        label_accuracy(table),
        rate(table, "identified"),
        compare(both, ["a", "b"]),
        over_rounds(both, pd.DataFrame(columns=["round"])),
        population(both, BASELINE),
        count_pictures(table),
        count_groups(table),
    ]


@pytest.mark.parametrize("images", [1, 4])
def test_more_trials_of_the_same_pictures_change_no_statistic(images: int) -> None:
    table = batches(6, images)
    trials = [table.assign(trial=trial) for trial in range(4)]
    once, often = everything(table), everything(pd.concat(trials, ignore_index=True))
    for first, second in zip(once, often, strict=True):
        assert str(first) == str(second)


def test_trials_are_averaged_and_the_worst_case_is_of_any() -> None:
    first = table([10, 30], [])
    second = first.assign(trial=1, psnr=[20.0, 32.0])
    told = describe(pd.concat([first, second]), "psnr")
    assert (told["mean"], told["worst_case"], told["typical"]) == (23, 32, 23)
    # 15 and 31 by picture: Student's quantile for one degree of freedom, times a deviation of 8
    assert (told["low"], told["high"]) == pytest.approx((23 - 8 * 12.7062, 23 + 8 * 12.7062))


def test_a_picture_met_in_several_rounds_is_one_picture() -> None:
    first = batches(4, 2)
    later = first.assign(round=2)
    both = pd.concat([first, later], ignore_index=True)
    assert count_pictures(both) == count_pictures(first) == 8
    assert count_groups(both) == count_groups(first) == 4
    assert interval(both, "psnr") == pytest.approx(interval(first, "psnr"))
    assert label_accuracy(both) == pytest.approx(label_accuracy(first))
    unlike = pd.concat([first, later.assign(picture=later["picture"] + 8)], ignore_index=True)
    assert (count_pictures(unlike), count_groups(unlike)) == (16, 8)


def test_rounds_that_share_some_pictures_are_drawn_together() -> None:
    rows = batches(3, 2)
    rows["picture"] = [0, 1, 1, 2, 5, 6]  # the second client's batch holds one of the first's
    assert (count_pictures(rows), count_groups(rows)) == (5, 2)


def test_scores_without_numbered_pictures_go_by_their_place() -> None:
    old = batches(3, 2).drop(columns="picture")
    again = pd.concat([old, old.assign(trial=1)], ignore_index=True)
    assert count_pictures(again) == count_pictures(old) == 6
    assert interval(again, "psnr") == interval(old, "psnr")


def test_a_rate_counts_pictures_that_are_alike_as_fewer() -> None:
    def told(shares: list[list[int]]) -> dict[str, float]:
        rows = [
            {"round": 1, "client": client, "image": image, "hit": hit}
            for client, hits in enumerate(shares)
            for image, hit in enumerate(hits)
        ]
        return rate(pd.DataFrame(rows), "hit")

    one_each = told([[1], [0], [1], [1], [0], [1]])
    assert one_each == proportion(4, 6)
    together = told([[1] * 8, [0] * 8, [1] * 8, [1] * 8, [0] * 8, [1] * 8])
    assert together == pytest.approx(one_each)  # each batch is one picture, eight times
    spread = told([[1, 1, 0, 1, 1, 0, 1, 0]] * 6)
    assert one_each["low"] < spread["low"] < spread["rate"] < spread["high"] < one_each["high"]
    assert told([[1] * 8] * 3) == proportion(3, 3)
    assert told([[0] * 8]) == proportion(0, 1)


def test_a_label_that_is_not_claimed_is_not_recovered() -> None:
    rows = batches(1, 4).assign(label_recovered=[1, None, None, None])
    (entry,) = population(rows, BASELINE)
    assert entry["labels"] == 0.25
    told = label_accuracy(rows)
    assert told is not None
    assert told["rate"] == 0.25


def test_a_picture_that_came_back_in_several_rounds_is_recovered_once() -> None:
    rows = pd.concat([table([35, 12], [12, 12]), table([36, 12], [12, 12]).assign(round=2)])
    rows["picture"] = rows["client"]
    (entry, _) = summarise(rows, Spec(), ["mine", BASELINE], {}, [])
    assert (entry["recovered"], entry["pictures"], entry["victims"]) == (1, 2, 4)
    assert entry["groups"] == 2


def test_the_chance_of_labels_is_what_random_names_come_to() -> None:
    truth, classes, coin = [0, 0, 1, 3], 4, np.random.default_rng(0)
    rows = batches(1, 4).assign(label_true=truth, label_recovered=[0, 1, 2, 3])
    named = coin.integers(classes, size=(20_000, 4))
    wanted = np.bincount(truth, minlength=classes)
    found = np.stack([np.minimum((named == k).sum(1), n) for k, n in enumerate(wanted)]).sum(0)
    assert label_chance(rows, classes) == pytest.approx(float(found.mean()) / 4, abs=0.01)
    one = batches(3, 1)
    assert label_chance(one, 10) == pytest.approx(0.1)
    none = rows.assign(label_recovered=[0, float("nan"), float("nan"), float("nan")])
    assert label_chance(none, classes) == pytest.approx(3 / 4 / 4)  # one name, three classes there
