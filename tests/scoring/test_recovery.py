"""Recovery: one rule for what shows its picture, beside a guess and the best flat colour."""

from __future__ import annotations

import pandas as pd
import pytest

from fedsim.core.attack import BASELINE
from fedsim.scoring.recovery import (
    FLAT,
    FLAT_ORIGINAL,
    ORIGINAL,
    beside_baseline,
    recovered,
    recovered_as_it_was,
    recovered_as_seen,
    stands_out,
)
from tests.staging import script

NAN = float("nan")


def row(
    psnr: float,
    guess: float = 12.0,
    *,
    flat: float = NAN,
    shifted: float = NAN,
    shifted_guess: float = NAN,
    ssim: float = 0.2,
    ssim_guess: float = 0.2,
    ssim_flat: float = NAN,
) -> pd.DataFrame:
    """One picture, beside the baseline's guess at it."""
    numbers = {"psnr": psnr, "psnr_baseline": guess, FLAT: flat, "psnr_registered": shifted}
    numbers |= {"psnr_registered_baseline": shifted_guess, "ssim": ssim}
    return pd.DataFrame([{**numbers, "ssim_baseline": ssim_guess, "ssim_flat": ssim_flat}])


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (row(30.0), True),
        (row(29.9), False),
        (row(35.0, 32.0), True),
        (row(35.0, 32.1), False),
        (row(35.0, flat=31.0), True),
        (row(35.0, flat=33.0), False),  # a flat colour does nearly as well
        (row(35.0, 12.0, flat=20.0), True),
        (row(12.0, shifted=160.0, shifted_guess=12.0), True),
        (row(12.0, shifted=35.0, shifted_guess=34.0), False),
        (row(12.0, shifted=35.0, shifted_guess=12.0, flat=34.0), False),
        (row(35.0, NAN), True),  # nobody guessed: 30 dB alone
        (row(35.0, NAN, flat=34.0), False),
    ],
)
def test_a_picture_is_recovered_where_neither_guess_nor_flat_colour_comes_near(
    picture: pd.DataFrame, expected: bool
) -> None:
    assert recovered(picture).tolist() == [expected]


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (row(29.6, 12.0, ssim=0.9), True),
        (row(22.0, 12.0, ssim=0.5), True),
        (row(29.6, 12.0, ssim=0.49), False),
        (row(21.9, 12.0, ssim=0.69), False),
        (row(21.9, 12.0, ssim=0.71), True),  # so much alike that it needs no decibels
        (row(21.9, 12.0, ssim=0.71, ssim_flat=0.3), False),  # a flat colour is alike as well
        (row(29.6, 12.0, ssim=0.9, ssim_flat=0.7), False),
        (row(21.9, NAN, ssim=0.9, ssim_flat=0.2, ssim_guess=NAN), True),
        (row(29.6, 12.0, flat=20.0, ssim=0.6), False),  # the guess was poor, not the picture clear
        (row(25.0, NAN, flat=12.0, ssim=0.5, ssim_guess=NAN), True),
        (row(25.0, NAN, flat=12.0, ssim=0.49, ssim_guess=NAN), False),
        (row(29.6, NAN, ssim=0.9, ssim_guess=NAN), False),  # beside nothing, nothing stands out
    ],
)
def test_a_picture_stands_out_by_both_of_its_margins_or_by_a_large_one_of_likeness(
    picture: pd.DataFrame, expected: bool
) -> None:
    assert stands_out(picture).tolist() == [expected]


def test_scores_from_before_there_were_flat_colours_are_judged_by_the_baseline_alone() -> None:
    old = row(35.0, 12.0, ssim=0.9)[["psnr", "psnr_baseline", "ssim", "ssim_baseline"]]
    assert recovered(old).all()
    assert stands_out(old).all()


def test_every_row_meets_the_baseline_of_its_own_picture_once() -> None:
    places = {"round": 1, "client": [0, 1, 0], "image": 0, "trial": [0, 0, 1]}
    rows = pd.DataFrame({**places, "attack": "mine", "psnr": [1.0, 2.0, 3.0]})
    twice = rows.assign(attack=BASELINE, psnr=[10.0, 20.0, 30.0])
    paired = beside_baseline(rows, twice)
    assert paired["psnr"].tolist() == [1.0, 2.0, 3.0]
    assert paired["psnr_baseline"].tolist() == [10.0, 20.0, 10.0]


def test_unrelated_photographs_never_stand_out() -> None:
    told = script("flukes.py", "--most", "24")
    assert "24 pictures of 32 px" in told
    assert "0 stand out, 0 count as recovered" in told
    closest = float(told.rpartition("closest is ")[2].split()[0])
    assert 0 < closest < 6  # far from the ten that are asked for
    alike = float(told.rpartition("most alike is ")[2].split()[0])
    assert 0 < alike < 0.3  # far from the half that says it alone


@pytest.mark.parametrize(
    ("original", "guess", "flat", "expected"),
    [
        (160.0, 12.0, 15.0, True),  # the client's own picture, though the model saw its mirror
        (29.9, 12.0, 15.0, False),
        (35.0, 33.0, 15.0, False),
        (35.0, 12.0, 34.0, False),  # a dark picture
        (35.0, 12.0, NAN, False),  # scores of an older version, which do not tell
    ],
)
def test_the_picture_as_it_was_counts_by_its_own_guess_and_flat_colour(
    original: float, guess: float, flat: float, expected: bool
) -> None:
    numbers = {ORIGINAL: original, f"{ORIGINAL}_baseline": guess, FLAT_ORIGINAL: flat}
    picture = row(11.0, flat=20.0).assign(**numbers)
    assert recovered_as_it_was(picture).tolist() == [expected]
    assert recovered(picture).tolist() == [expected]
    assert recovered_as_seen(picture).tolist() == [False]
