"""Verdicts: the rules, each on scores made for it."""

from __future__ import annotations

import pandas as pd
import pytest

from fedsim.core.attack import BASELINE
from fedsim.core.spec import Spec
from fedsim.scoring.verdict import summarise
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
