"""Verdicts: the rules, each on scores made for it."""

from __future__ import annotations

import pandas as pd
import pytest

from fedsim.core.attack import BASELINE
from fedsim.core.spec import Component, DataSpec, Spec
from fedsim.scoring.verdict import Asked, asked_of, summarise
from tests.scoring.conftest import table


def verdict(scores: pd.DataFrame, failed: list[dict[str, str]] | None = None) -> dict:
    return summarise(scores, Spec(), ["mine", BASELINE], {}, failed or [])[0]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (table([35, 12, 12], [12, 12, 12]), "LEAKS"),
        (table([35, 12, 12], [33, 12, 12]), "NOT RECOVERED"),
        (table([29, 12, 12], [12, 12, 12]), "NOT RECOVERED"),
        (table([20, 19, 21], [12, 12, 12]), "PARTIAL"),
        (table([12, 12, 12], [12, 12, 12], ssim=0.4), "PARTIAL"),
        (table([12, 12, 12], [12, 12, 12]), "NOT RECOVERED"),
        (table([20, 19, 21], [12, 12, 12], canary=0.1), "MIS-SPECIFIED"),
        (table([12, 12, 12], [12, 12, 12], canary=float("nan")), "MIS-SPECIFIED"),
        (table([35, 12, 12], [12, 12, 12], canary=0.1), "LEAKS"),
        (table([35, 12], []), "LEAKS"),
        (table([25, 12], []), "NOT RECOVERED"),
        (table([], [12]), "NO RESULT"),
    ],
)
def test_a_verdict_follows_its_rule(scores: pd.DataFrame, expected: str) -> None:
    assert verdict(scores)["verdict"] == expected


def test_not_recovered_never_says_safe() -> None:
    words = verdict(table([12], [12]))["words"]
    assert "at this budget" in words
    assert "safe" not in words.lower()


def test_no_result_gives_its_reason() -> None:
    failed = [{"attack": "mine", "reason": "the worker died", "kind": "crashed", "job": "x"}]
    assert "the worker died" in verdict(table([], [12]), failed)["words"]


def test_the_worst_case_is_the_closest_image() -> None:
    assert verdict(table([14, 22], [12, 12]))["metrics"]["psnr"]["worst_case"] == 22


def judged(scores: pd.DataFrame, asked: Asked, label: str = "mine") -> dict:
    entries = summarise(scores, Spec(), ["mine", BASELINE], {}, [], asked=asked)
    return next(entry for entry in entries if entry["attack"] == label)


FOUR = Asked(victims=4, trials=1, baseline=BASELINE)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (table([12, 12, 12, 12], [12, 12, 12, 12]), "NOT RECOVERED"),
        (table([12, 12, 12], [12, 12, 12, 12]), "INCOMPLETE"),
        (table([20, 19, 21], [12, 12, 12, 12]), "INCOMPLETE"),
        (table([35, 12, 12], [12, 12, 12, 12]), "LEAKS"),
        (table([12, 12, 12], [12, 12, 12, 12], canary=0.1), "MIS-SPECIFIED"),
        (table([25, 12, 12, 12], [12, 12, 12]), "INCOMPLETE"),
        (table([25, 12, 12, 12], []), "INCOMPLETE"),
        (table([], [12, 12, 12, 12]), "NO RESULT"),
    ],
)
def test_less_than_was_asked_for_is_never_a_failure_to_recover(
    scores: pd.DataFrame, expected: str
) -> None:
    assert judged(scores, FOUR)["verdict"] == expected


def test_a_verdict_names_its_victims_and_compares_the_same_pictures() -> None:
    entry = judged(table([12], [10, 30, 30, 30]), FOUR)
    assert (entry["victims"], entry["victims_of"]) == (1, 4)
    assert entry["baseline"]["psnr"] == 10
    assert "3 of 4 victims could not be scored" in entry["words"]
    assert "1 of 4 victims" in entry["words"]
    for scores in (table([12] * 4, [12] * 4), table([35] * 4, [12] * 4), table([20] * 4, [12] * 4)):
        assert "4 of 4 victims" in judged(scores, FOUR)["words"]
        assert "4 of 4 victims" in judged(scores, FOUR, BASELINE)["words"]
    assert judged(table([], [12]), FOUR)["victims_of"] == 4


def test_a_trial_that_is_missing_leaves_an_attack_incomplete() -> None:
    scores = table([12, 12], [12, 12])
    twice = pd.concat([scores, scores[scores["attack"] == "mine"].assign(trial=1)])
    asked = Asked(victims=2, trials=2, baseline=BASELINE)
    assert judged(twice, asked)["verdict"] == "NOT RECOVERED"
    entry = judged(twice.iloc[:-1], asked)
    assert entry["verdict"] == "INCOMPLETE"
    assert "1 of 4 trials could not be scored" in entry["words"]


def test_the_baseline_is_known_by_what_it_is() -> None:
    scores = table([35, 35], [12, 12])
    named = scores.replace({"attack": {"mine": BASELINE, BASELINE: "a guess"}})
    asked = Asked(victims=2, trials=1, baseline="a guess")
    first, second = summarise(named, Spec(), [BASELINE, "a guess"], {}, [], asked=asked)
    assert (first["verdict"], second["verdict"]) == ("LEAKS", "BASELINE")
    spec = Spec(attacks=[Component(name=BASELINE, title="a guess")], data=DataSpec(clients=3))
    assert asked_of(spec) == Asked(victims=3, trials=1, baseline="a guess")
