"""The table of a bench: the stronger way counts, seeds are averaged."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedsim.bench.table import aggregate, as_markdown, by_cell, pareto
from fedsim.core.metrics import METRICS


def frames(
    scores: dict[tuple[str, int], list[float]], asked: int = 1
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pictures and outcomes of one cell: for each attack and seed, the PSNR of its pictures."""
    cost = {"accuracy": 0.5, "rounds_to_target": None, "bytes_a_round": 1024.0}
    cost |= {"upload_bytes": 1024.0, "round_seconds": 1.0, "epsilon": None}
    same = {"defense": "d", "strength": "s"}
    pictures, outcomes = [], []
    for (attack, seed), values in scores.items():
        own = {**same, "attack": attack, "seed": seed}
        about = {"baseline": attack == "a guess", "victims": len(values), "victims_of": asked}
        outcomes.append(
            {**own, **about, "verdict": "", "doubt": "", **cost, "accuracy": 0.5 + 0.1 * seed}
        )
        for client, psnr in enumerate(values):
            numbers = dict.fromkeys((*METRICS, "identified"))
            about = {"round": 1, "client": client, "trial": 0, "seconds": 1.0}
            labels = {"label_true": 1, "label_recovered": 1}
            found = {"psnr": psnr, "ssim": psnr / 100}
            pictures.append({**own, **about, **numbers, **labels, **found})
    return pd.DataFrame(pictures), pd.DataFrame(outcomes)


def test_of_two_ways_the_stronger_counts_and_seeds_are_averaged() -> None:
    scores = {("a", 0): [10.0], ("a", 1): [20.0], ("a naive", 0): [30.0], ("a naive", 1): [20.0]}
    table = aggregate(*frames({**scores, ("a guess", 0): [99.0]}))
    assert len(table) == 1
    assert (table["psnr"][0], table["psnr_naive"][0], table["psnr_adaptive"][0]) == (25, 25, 15)
    # Student's, of the two seeds 30 and 20: 12.706 standard errors of 5 either way.
    assert (table["psnr_low"][0], table["psnr_high"][0]) == pytest.approx((-38.53, 88.53), abs=0.01)
    assert "15.0 (25.0) [-38.5, 88.5]" in as_markdown(table)
    assert "55 % (50 to 60)" in as_markdown(table)
    (cell,) = by_cell(table)
    assert cell["front"]


def test_a_cell_with_fewer_victims_than_were_asked_for_says_so() -> None:
    table = aggregate(*frames({("a", 0): [12.0, 12.0, 12.0], ("b", 0): [12.0] * 4}, asked=4))
    assert "| d | s | 12.0, 3 of 4 victims | 12.0 |" in as_markdown(table)


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    accuracy = np.array([0.9, 0.8, 0.7, 0.8])
    leakage = np.array([1.0, 0.3, 0.5, 0.3])
    assert pareto(accuracy, leakage).tolist() == [True, True, False, True]


def test_an_attack_that_declines_is_told_and_does_not_count() -> None:
    table = aggregate(*frames({("a", 0): [], ("b", 0): [12.0]}))
    assert "| d | s | declined | 12.0 |" in as_markdown(table)
    (cell,) = by_cell(table)
    assert cell["attack"] == "b"


def test_trials_of_a_picture_are_one_picture_and_seeds_are_apart() -> None:
    pictures, outcomes = frames({("a", 0): [10.0, 20.0], ("a", 1): [12.0, 22.0]})
    first = pictures.assign(image=0, picture=pictures["client"])
    better = first.assign(trial=1, psnr=[40.0, 20.0, 12.0, 22.0])
    once = aggregate(first, outcomes).iloc[0]
    same = aggregate(pd.concat([first, first.assign(trial=1)], ignore_index=True), outcomes).iloc[0]
    both = aggregate(pd.concat([first, better], ignore_index=True), outcomes).iloc[0]
    assert once["pictures"] == same["pictures"] == both["pictures"] == 4
    assert (once["psnr_low"], once["psnr_high"]) == (same["psnr_low"], same["psnr_high"])
    assert (once["recovered"], both["recovered"], both["psnr_worst"]) == (0, 0.25, 40)
    assert both["psnr"] == (25 + 20 + 12 + 22) / 4


def test_what_either_way_recovered_is_recovered() -> None:
    scores = {("a", 0): [60.0, *7 * [10.0]], ("a naive", 0): 8 * [20.0], ("a guess", 0): 8 * [12.0]}
    pictures, outcomes = frames(scores)
    verdicts = {"a": "LEAKS", "a naive": "PARTIAL", "a guess": "BASELINE"}
    outcomes["verdict"] = outcomes["attack"].map(verdicts)
    (row,) = aggregate(pictures.assign(image=0), outcomes).to_dict("records")
    assert row["psnr"] == row["psnr_naive"] == 20
    assert (row["recovered"], row["psnr_worst"], row["verdict"]) == (1 / 8, 60, "LEAKS")


def test_one_picture_of_several_seeds_counts_once() -> None:
    pictures, outcomes = frames({("a", seed): [10.0 + seed, 30.0] for seed in range(3)})
    pictures = pictures.assign(image=0, picture=pictures["client"])
    apart = aggregate(pictures, outcomes).iloc[0]
    same = aggregate(pictures.assign(digest="one"), outcomes).iloc[0]
    assert (apart["pictures"], same["pictures"]) == (6, 1)
    assert apart["psnr_low"] < apart["psnr_high"]
    assert same["psnr_low"] == same["psnr_high"]
    known = pictures.assign(digest=[f"{row.seed} {row.client}" for row in pictures.itertuples()])
    again = aggregate(known, outcomes).iloc[0]
    assert (again["psnr_low"], again["psnr_high"]) == (apart["psnr_low"], apart["psnr_high"])
