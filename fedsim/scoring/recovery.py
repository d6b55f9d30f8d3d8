"""Recovery: which reconstructions show their picture. One rule, for verdicts and benchmarks alike.

Every reconstruction is read beside what can be had for nothing: the baseline's guess at the same
picture, and the best flat colour, which scores high on a dark or an even picture whoever names it
(``psnr_flat``, and its SSIM, ``ssim_flat``). What is not known of these, in scores of older
versions or where no baseline could run, is left out of the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedsim.scoring.statistics import KEYS

RECOVERED_DB, ABOVE_BASELINE_DB = 30.0, 3.0
# Ten decibels above the best flat colour are nine tenths of all that varies in a picture: unrelated
# pictures do not come near each other like that (`experiments/flukes.py` counts).
STANDS_OUT_DB, STANDS_OUT_SSIM = 10.0, 0.3
# Half of all SSIM above what is had for nothing says so by itself: unrelated photographs reach 0.21
# (120 built-in ones of 32 px, `experiments/flukes.py --most 120`).
ALONE_SSIM = 0.5
CLEAR_SSIM = 0.5  # asked of a picture that stands out where there is no baseline

FLAT, FLAT_SSIM = "psnr_flat", "ssim_flat"
# Against the client's own picture, where the model saw it augmented.
ORIGINAL, FLAT_ORIGINAL = "psnr_original", "psnr_flat_original"
_FLAT_OF = {  # no shift changes it
    **{"psnr": FLAT, "psnr_registered": FLAT, "ssim": FLAT_SSIM},
    ORIGINAL: FLAT_ORIGINAL,
}
_PLACED = ("psnr", "psnr_registered")  # a picture that came back elsewhere came back


def beside_baseline(
    rows: pd.DataFrame, baseline: pd.DataFrame, keys: Sequence[str] = KEYS
) -> pd.DataFrame:
    """The rows of an attack, each with the baseline's numbers for the same picture; in order."""
    kept = baseline.drop_duplicates(list(keys))
    return rows.merge(kept, on=list(keys), how="left", suffixes=("", "_baseline"))


def recovered(paired: pd.DataFrame) -> pd.Series:
    """The rule of LEAKS, row by row: 30 dB or more, and 3 dB or more above the better of baseline
    and flat colour; in place, or after the shift that registration finds; of the picture as the
    model saw it, or as it was before that was augmented."""
    return recovered_as_seen(paired) | recovered_as_it_was(paired)


def recovered_as_seen(paired: pd.DataFrame) -> pd.Series:
    """The rule of LEAKS for pictures as the model saw them."""
    hit = pd.Series(False, index=paired.index)
    for metric in _PLACED:
        hit |= _hit(paired, metric)
    return hit


def recovered_as_it_was(paired: pd.DataFrame) -> pd.Series:
    """The rule of LEAKS for the clients' own pictures; not where scores of older versions do not
    tell what a flat colour has of those."""
    return _hit(paired, ORIGINAL) & _numbers(paired, FLAT_ORIGINAL).notna()


def _hit(paired: pd.DataFrame, metric: str) -> pd.Series:
    value = _numbers(paired, metric)
    return (value >= RECOVERED_DB) & _above(value, _free(paired, metric), ABOVE_BASELINE_DB)


def stands_out(paired: pd.DataFrame) -> pd.Series:
    """Where one picture is far beyond a guess at it: by 10 dB and 0.3 SSIM above the better of
    baseline and flat colour (without a baseline, 0.5 SSIM in all), or by 0.5 SSIM alone. With
    neither baseline nor flat colour nothing is known to stand out."""
    psnr, ssim = _numbers(paired, "psnr"), _numbers(paired, "ssim")
    gain, guess = ssim - _free(paired, "ssim"), _numbers(paired, "ssim_baseline")
    alike = (gain >= STANDS_OUT_SSIM).where(guess.notna(), ssim >= CLEAR_SSIM)
    return ((psnr - _free(paired, "psnr") >= STANDS_OUT_DB) & alike) | (gain >= ALONE_SSIM)


def above_flat(paired: pd.DataFrame) -> pd.Series:
    """How far the PSNR is above that of the best flat colour; NaN where the scores do not tell."""
    return _numbers(paired, "psnr") - _numbers(paired, FLAT)


def above_free(paired: pd.DataFrame, metric: str) -> pd.Series:
    """How far a metric is above the better of baseline and flat colour; NaN where there was no
    baseline."""
    known = _numbers(paired, f"{metric}_baseline").notna()
    return (_numbers(paired, metric) - _free(paired, metric)).where(known)


def _free(paired: pd.DataFrame, metric: str) -> pd.Series:
    """The better of baseline and flat colour; NaN where both are not known."""
    guess, flat = _numbers(paired, f"{metric}_baseline"), _numbers(paired, _FLAT_OF[metric])
    return pd.concat([guess, flat], axis=1).max(axis=1)


def _above(value: pd.Series, other: pd.Series, margin: float) -> pd.Series:
    return (value - other >= margin) | other.isna()


def _numbers(table: pd.DataFrame, column: str) -> pd.Series:
    if column not in table:
        return pd.Series(float("nan"), index=table.index)
    return table[column].astype(float)
