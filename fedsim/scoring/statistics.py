"""Statistics of scores: intervals that respect which pictures hang together, pairs, ranks.

Victims are drawn anew, not pictures, because the pictures of one client's batch are attacked
together. A proportion gets an exact binomial interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from fedsim.core.metrics import METRICS, Metric, shown_in

KEYS = ["round", "client", "image"]
DRAWS = 2000


def bootstrap(
    table: pd.DataFrame, column: str, seed: int, draws: int = DRAWS
) -> tuple[float, float]:
    """95 % interval of the mean, resampling victims (images of one client hang together)."""
    victims = [g[column].to_numpy(float) for _, g in table.groupby(["round", "client"])]
    return resampled(victims, seed, draws)


def resampled(groups: Sequence[np.ndarray], seed: int, draws: int = DRAWS) -> tuple[float, float]:
    """95 % interval of the mean of all values, drawing whole groups anew (percentile bootstrap)."""
    sums = np.array([g.sum() for g in groups])
    counts = np.array([len(g) for g in groups])
    picks = np.random.default_rng(seed).integers(0, len(groups), (draws, len(groups)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def describe(own: pd.DataFrame, metric: str, seed: int) -> dict[str, float | None]:
    """Mean with its interval, the worst case for the client, and where most pictures lie.

    ``typical`` is the median; a tenth of the pictures come closer than ``exposed``.
    """
    names = ("mean", "low", "high", "worst_case", "typical", "exposed")
    values = own[metric].astype(float)
    if values.isna().all():
        return dict.fromkeys(names)
    low, high = bootstrap(own.dropna(subset=[metric]), metric, seed)
    about = METRICS[metric]
    described = (
        values.mean(),
        low,
        high,
        _closest(values, about),
        values.median(),
        values.quantile(0.9 if about.higher_leaks else 0.1),
    )
    return {name: clean(value) for name, value in zip(names, described, strict=True)}


def _closest(values: pd.Series, metric: Metric) -> float:
    """The worst case for the client."""
    numbers = values.astype(float)
    return float(numbers.max() if metric.higher_leaks else numbers.min())


def proportion(hits: int, of: int) -> dict[str, float]:
    """A rate with its exact 95 % interval (Clopper, Pearson)."""
    interval = binomtest(hits, of).proportion_ci(method="exact")
    return {"rate": hits / of, "low": float(interval.low), "high": float(interval.high)}


def above_chance(hits: int, of: int, chance: float) -> float:
    """How probable so many hits or more are by chance alone."""
    return float(binomtest(hits, of, chance, alternative="greater").pvalue)


def compare(scores: pd.DataFrame, labels: list[str], seed: int) -> list[dict[str, Any]]:
    """Every attack against every later one: the mean difference over the same pictures (each a mean
    over trials) in every headline metric, with intervals."""
    names = [metric.name for metric in shown_in("headlines")]
    means = scores.groupby(["attack", *KEYS], sort=False)[names].mean()
    present = [label for label in labels if label in means.index.get_level_values("attack")]
    pairs = []
    for at, first in enumerate(present):
        for second in present[at + 1 :]:
            apart = (means.loc[first] - means.loc[second]).dropna().reset_index()
            if apart.empty:
                continue
            entry: dict[str, Any] = {"first": first, "second": second, "pictures": len(apart)}
            entry |= {name: _mean_with_interval(apart, name, seed) for name in names}
            pairs.append(entry)
    return pairs


def population(scores: pd.DataFrame, baseline: str) -> list[dict[str, Any]]:
    """The attacked updates, the most exposed first: of each the closest reconstruction, and the
    largest share of labels and of pictures that any attack recovered and identified."""
    attacked = scores[scores["attack"] != baseline]
    if attacked.empty:
        return []
    guesses = scores[scores["attack"] == baseline].groupby(["round", "client"])["psnr"].mean()
    ranked = []
    for at, here in attacked.groupby(["round", "client"]):
        round_, client = _pair(at)
        best = here.sort_values("psnr").iloc[-1]
        by_attack = here.groupby("attack")["identified"].apply(lambda x: x.astype(float).mean())
        headlines = {m.name: clean(_closest(here[m.name], m)) for m in shown_in("headlines")}
        ranked.append(
            {
                "round": round_,
                "client": client,
                "pictures": int(here["image"].nunique()),
                "attack": str(best["attack"]),
                **headlines,
                "psnr": clean(best["psnr"]),
                "guess": clean(guesses.get((round_, client), float("nan"))),
                "labels": _label_share(here),
                "identified": None if by_attack.isna().all() else clean(by_attack.max()),
            }
        )
    return sorted(ranked, key=lambda entry: (-(entry["psnr"] or 0.0), entry["round"]))


def over_rounds(scores: pd.DataFrame, rounds: pd.DataFrame, seed: int) -> list[dict[str, Any]]:
    """Leakage as training goes on: a row per attack and round, with the accuracy of the model that
    the clients were sent."""
    accuracy = {
        int(row["round"]) + 1: clean(row["test_accuracy"])
        for row in rounds.to_dict("records")
        if "test_accuracy" in row and pd.notna(row["test_accuracy"])
    }
    rows = []
    for _, here in scores.groupby(["attack", "round"], sort=False):
        attack, round_ = str(here["attack"].iloc[0]), int(here["round"].iloc[0])
        row: dict[str, Any] = {"attack": attack, "round": round_, "pictures": len(here)}
        row |= {m.name: _mean_with_interval(here, m.name, seed) for m in shown_in("headlines")}
        row["accuracy_before"] = accuracy.get(round_)
        rows.append(row)
    return rows


def _mean_with_interval(table: pd.DataFrame, column: str, seed: int) -> dict[str, float | None]:
    low, high = bootstrap(table, column, seed)
    return {"mean": clean(table[column].mean()), "low": low, "high": high}


def label_accuracy(own: pd.DataFrame) -> dict[str, float] | None:
    """The share of labels recovered; None for attacks that recover none."""
    if own["label_recovered"].isna().all():
        return None
    right = int((own["label_recovered"] == own["label_true"]).sum())
    return proportion(right, len(own))


def _label_share(rows: pd.DataFrame) -> float | None:
    known = rows.dropna(subset=["label_recovered"])
    if known.empty:
        return None
    right = known["label_recovered"] == known["label_true"]
    return clean(right.groupby(known["attack"]).mean().max())


def _pair(key: Any) -> tuple[int, int]:
    return int(key[0]), int(key[1])


def clean(value: Any) -> float | None:
    """A number that JSON can hold, or None."""
    number = float(value)
    return number if np.isfinite(number) else None
