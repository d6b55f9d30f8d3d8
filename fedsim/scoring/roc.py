"""ROC: how well scores tell members from others, of the same update and in the same trial.

The area under the curve is the share of pairs, a member and another of one update, in which the
member scores higher; ties count half. Pairs are made within an update alone, so that no update's
scale decides. A member's *placement* is its share of such pairs, and the area is their mean.

The interval of the area is the wider of two: Student's over victims, as for every other mean (the
candidates of one update hang together), and DeLong's (1988) over candidates, which is all that one
victim has. Where every pair falls the same way neither has a width; there it is the exact binomial
one, of as many pictures as the smaller side has.

The true positive rate at a false positive rate of 1 % (Carlini et al. 2022) says whether anybody is
told for sure. Its threshold is one for all updates, and fewer than a hundred others cannot resolve
1 %: then it is the rate above all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm, rankdata

from fedsim.scoring.statistics import clean, count_groups, interval, proportion, rate

FALSE_POSITIVES = 0.01
RESOLVES = round(1 / FALSE_POSITIVES)
UPDATE = ["round", "client", "trial"]


def told_apart(members: pd.DataFrame, others: pd.DataFrame, column: str) -> dict[str, Any] | None:
    """How well a column of scores tells members from others: the area with its interval, and the
    true positive rate at 1 % false positives; None where one side lacks it."""
    members, others = members.dropna(subset=[column]), others.dropna(subset=[column])
    placed = _placed(members, others, column)
    if placed is None:
        return None
    ours, theirs = placed
    low, high = _interval(ours, theirs)
    hits, resolved, beyond = _hits(members, others, column)
    found = rate(hits, "hit")
    return {
        "auc": clean(ours["placement"].mean()),
        "low": clean(low),
        "high": clean(high),
        "tpr": clean(found["rate"]),
        "tpr_low": clean(found["low"]),
        "tpr_high": clean(found["high"]),
        "fpr": FALSE_POSITIVES if resolved else 0.0,
        "resolved": resolved,
        "members": len(_apart(ours)),
        "others": beyond,
    }


def curve(members: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    rates = [np.searchsorted(np.sort(side), thresholds, "left") for side in (others, members)]
    false, true = (
        np.concatenate([[0.0], 1 - below / len(side)])
        for below, side in zip(rates, (others, members), strict=True)
    )
    return false, true


def placements(scores: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """Of each score the share of those ``beside`` it that are lower; equal ones count half."""
    joint = rankdata(np.concatenate([scores, beside]))[: len(scores)]
    lower: np.ndarray = (joint - rankdata(scores)) / len(beside)
    return lower


def _placed(
    members: pd.DataFrame, others: pd.DataFrame, column: str
) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Members and others with their placements beside the other side of their update; without
    updates in which one side is lacking."""
    beside = dict(list(others.groupby(UPDATE)))
    pairs = [(own, beside[at]) for at, own in members.groupby(UPDATE) if at in beside]
    if not pairs:
        return None
    ours, theirs = [], []
    for own, other in pairs:
        sides = own[column].to_numpy(float), other[column].to_numpy(float)
        ours.append(own.assign(placement=placements(*sides)))
        theirs.append(other.assign(placement=placements(*sides[::-1])))
    return pd.concat(ours), pd.concat(theirs)


def _apart(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each candidate of each update: its mean over trials."""
    means = table.groupby(["round", "client", "image"])["placement"].mean()
    return means.reset_index()


def _interval(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[float, float]:
    area = float(ours["placement"].mean())
    if area in (0.0, 1.0):
        least = min(len(_apart(ours)), len(_apart(theirs)))
        exact = proportion(area * least, least)
        return exact["low"], exact["high"]
    reach = float(norm.ppf(0.975)) * _delong(_apart(ours), _apart(theirs)) ** 0.5
    low, high = area - reach, area + reach
    if count_groups(ours) > 1:
        over_victims = interval(ours, "placement")
        low, high = min(low, over_victims[0]), max(high, over_victims[1])
    return max(low, 0.0), min(high, 1.0)


def _delong(ours: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """The variance of the mean placement, victim by victim: DeLong, DeLong, Clarke-Pearson."""
    total, variance = len(ours), 0.0
    beside = dict(list(theirs.groupby(["round", "client"])["placement"]))
    for at, own in ours.groupby(["round", "client"])["placement"]:
        sides = [_mean_variance(side.to_numpy(float)) for side in (own, beside[at])]
        variance += (len(own) / total) ** 2 * sum(sides)
    return variance


def _mean_variance(values: np.ndarray) -> float:
    """Of the mean; a single value could as well have been any: the most that lies in [0, 1]."""
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.25


def _hits(
    members: pd.DataFrame, others: pd.DataFrame, column: str
) -> tuple[pd.DataFrame, bool, int]:
    """Members, each with whether it is above all but 1 % of the others of its trial; whether those
    are enough to tell; and how many they are."""
    found, fewest = [], len(others)
    for trial, own in members.groupby("trial"):
        there = np.sort(others.loc[others["trial"] == trial, column].to_numpy(float))
        if not len(there):
            continue
        fewest = min(fewest, len(there))
        threshold = there[len(there) - 1 - int(FALSE_POSITIVES * len(there))]
        found.append(own.assign(hit=(own[column] > threshold).astype(float)))
    return pd.concat(found), fewest >= RESOLVES, fewest
