"""Words of a verdict: careful sentences, and "not recovered" never reads as "safe"."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.scoring.wording import closest, stand_out_words, words_of

VERDICTS = ["LEAKS", "PARTIAL", "NOT RECOVERED", "INCOMPLETE", "MIS-SPECIFIED", "BASELINE"]


def entry(verdict: str, mean: float = 12.0, guess: float | None = 11.5, **more: Any) -> Any:
    numbers = {"mean": mean, "worst_case": mean + 1}
    return {
        **{"attack": "mine", "verdict": verdict, "victims": 3, "victims_of": 4, "groups": 3},
        **{"metrics": {"psnr": numbers}, "baseline": {"psnr": guess}, "stand_out": None},
        **{"is_baseline": False, "lacking": "one victim has no result", **more},
    }


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_is_told_without_the_word_safe(verdict: str) -> None:
    words = words_of(entry(verdict)).lower()
    assert words.startswith("mine ")
    assert "safe" not in words.replace("nothing about safety", "")


@pytest.mark.parametrize("verdict", [v for v in VERDICTS if v != "MIS-SPECIFIED"])
def test_a_verdict_names_how_many_victims_stand_behind_it(verdict: str) -> None:
    assert "3 of 4 victims" in words_of(entry(verdict))


def test_the_guess_is_told_where_there_is_one() -> None:
    assert "(a guess without the update: 11.5 dB)" in words_of(entry("LEAKS"))
    assert "a guess" not in words_of(entry("LEAKS", guess=None))


def test_an_incomplete_attack_says_what_it_lacks() -> None:
    assert "because one victim has no result" in words_of(entry("INCOMPLETE"))


def test_the_baseline_and_an_attack_that_never_looked_are_told_apart() -> None:
    assert words_of(entry("BASELINE", is_baseline=True)).startswith("A guess that never sees")
    assert "never looked at an update" in words_of(entry("BASELINE"))


def test_one_update_above_a_guess_is_told_and_decides_nothing() -> None:
    words = "may be chance with one update alone"
    assert words in words_of(entry("NOT RECOVERED", 13.0, groups=1))
    assert words not in words_of(entry("NOT RECOVERED", 13.0, groups=2))
    assert words not in words_of(entry("NOT RECOVERED", 12.0, groups=1))
    assert words not in words_of(entry("NOT RECOVERED", 13.0, None, groups=1))


def test_a_picture_that_came_back_shifted_is_told_at_both_places() -> None:
    numbers = {"psnr": {"worst_case": 12.0}, "psnr_registered": {"worst_case": 15.0}}
    assert closest({"metrics": numbers}) == "12.0 dB (15.0 dB once shifted into place)"
    numbers["psnr_registered"]["worst_case"] = 14.9
    assert closest({"metrics": numbers}) == "12.0 dB"


def test_of_augmented_pictures_it_is_told_which_came_back() -> None:
    found = {"seen": 2, "originals": 0, "of": 3, "closest_original": 12.34}
    words = words_of(entry("LEAKS", originals=found))
    assert "as the model saw them, augmented: 2 of 3 came back; of the originals 0" in words
    assert "(the closest: 12.3 dB)" in words
    assert "augmented" not in words_of(entry("LEAKS"))


def test_pictures_that_stand_out_are_counted() -> None:
    found = {"pictures": 2, "of": 4, "where": "round 1, client 2, image 0"}
    words = stand_out_words({**found, "psnr": 29.64, "ssim": 0.918})
    assert words.startswith("2 of 4 pictures stand out from a guess")
    assert "round 1, client 2, image 0, 29.6 dB, SSIM 0.92" in words
    assert "2 of 4 pictures" in words_of(
        entry("PARTIAL", stand_out={**found, "psnr": 1, "ssim": 0})
    )
    assert "without a clear picture" in words_of(entry("PARTIAL"))


@pytest.mark.parametrize(("mean", "tells"), [(0.99, True), (0.8, False), (0.1, False)])
def test_features_no_closer_than_a_grey_pictures_are_not_said_to_tell(
    mean: float, tells: bool
) -> None:
    found = {"mean": mean, "least": mean, "free": 0.78, "of": 4}
    words = words_of(entry("NOT RECOVERED", claims=False, features=found))
    assert ("they tell what a picture shows" in words) == tells
    assert ("hardly more than is had for nothing" in words) != tells
