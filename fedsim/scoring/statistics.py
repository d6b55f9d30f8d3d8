"""Statistics of scores: intervals that respect which pictures hang together, pairs, ranks.

A picture counts once: its trials, and the rounds in which it was met again, are averaged before
anything else is. An interval is over victims, not pictures, because the pictures of one client's
batch are attacked together; victims that share a picture count as one. A rate gets an exact
binomial interval, of as many pictures as its victims are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import beta, binom, t

from fedsim.core.metrics import METRICS, Metric, shown_in

VICTIM = ["round", "client"]
KEYS = [*VICTIM, "image"]


def picture_numbers(table: pd.DataFrame) -> np.ndarray:
    """Which picture each row is of: as the scores say, or by its place where they do not."""
    places: Any = table.groupby(KEYS).ngroup() if "image" in table else np.arange(len(table))
    words = pd.Series(places, index=table.index).map("place {}".format)
    if "picture" in table:
        words = table["picture"].map(str).where(table["picture"].notna(), words)
    return pd.factorize(words)[0]


def count_pictures(table: pd.DataFrame) -> int:
    """Distinct pictures, however many trials and rounds."""
    return len(np.unique(picture_numbers(table)))


def count_groups(table: pd.DataFrame) -> int:
    """Victims that can be drawn anew: those that share a picture are one."""
    return len(np.unique(_groups(table, picture_numbers(table))))


def by_picture(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row for each picture: its mean ``value``, and the ``group`` of victims it belongs to."""
    valued = table[table[column].notna()]
    pictures = picture_numbers(valued)
    each = pd.DataFrame(
        {
            "picture": pictures,
            "group": _groups(valued, pictures),
            "value": valued[column].to_numpy(float),
        }
    )
    return each.groupby("picture").agg(value=("value", "mean"), group=("group", "first"))


def _groups(table: pd.DataFrame, pictures: np.ndarray) -> np.ndarray:
    """A number for each row: victims are together where they share a picture."""
    victims = table.groupby(VICTIM).ngroup().to_numpy()
    size = int(victims.max(initial=-1)) + 1
    nodes = size + int(pictures.max(initial=-1)) + 1
    links = coo_array((np.ones(len(victims)), (victims, size + pictures)), shape=(nodes, nodes))
    numbers: np.ndarray = connected_components(links, directed=False)[1]
    return numbers[victims]


def interval(table: pd.DataFrame, column: str) -> tuple[float, float]:
    """95 % interval of the mean over pictures, by victims (images of one client hang together)."""
    return _interval(by_picture(table, column))


def _interval(each: pd.DataFrame) -> tuple[float, float]:
    if each.empty:
        return float("nan"), float("nan")
    return mean_interval([g["value"].to_numpy() for _, g in each.groupby("group")])


def mean_interval(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """95 % interval of the mean of all values, where those of a group hang together: Student's, of
    as many degrees of freedom as there are groups, less one. A percentile bootstrap of eight groups
    covers the mean in 86 of 100 cases. One group alone has no interval: both ends are its mean."""
    sums = np.array([g.sum() for g in groups], dtype=float)
    counts = np.array([len(g) for g in groups], dtype=float)
    mean, number = sums.sum() / counts.sum(), len(groups)
    if number == 1:
        return float(mean), float(mean)
    apart = sums - mean * counts  # of unequal groups the mean is a ratio
    error = np.sqrt(number / (number - 1) * np.square(apart).sum()) / counts.sum()
    reach = float(t.ppf(0.975, number - 1)) * error
    return float(mean - reach), float(mean + reach)


def describe(own: pd.DataFrame, metric: str) -> dict[str, float | None]:
    """Mean with its interval, the worst case for the client, and where most pictures lie.

    ``typical`` is the median; a tenth of the pictures come closer than ``exposed``. The worst case
    is that of any trial; everything else is of pictures, each the mean of its trials.
    """
    names = ("mean", "low", "high", "worst_case", "typical", "exposed")
    if own[metric].isna().all():
        return dict.fromkeys(names)
    each = by_picture(own, metric)
    about = METRICS[metric]
    described = (
        each["value"].mean(),
        *_interval(each),
        _closest(own[metric], about),
        each["value"].median(),
        each["value"].quantile(0.9 if about.higher_leaks else 0.1),
    )
    return {name: clean(value) for name, value in zip(names, described, strict=True)}


def _closest(values: pd.Series, metric: Metric) -> float:
    """The worst case for the client."""
    numbers = values.astype(float)
    return float(numbers.max() if metric.higher_leaks else numbers.min())


def proportion(hits: float, of: float) -> dict[str, float]:
    """A rate with its exact 95 % interval (Clopper, Pearson); also of fractions of pictures."""
    low = float(beta.ppf(0.025, hits, of - hits + 1)) if hits > 0 else 0.0
    high = float(beta.ppf(0.975, hits + 1, of - hits)) if hits < of else 1.0
    return {"rate": hits / of, "low": low, "high": high}


def rate(table: pd.DataFrame, column: str) -> dict[str, float]:
    """The share of pictures for which a column of zeros and ones is one, with its interval.

    The interval is the exact binomial one for as many pictures as would vary as much if each were
    a victim of its own (Korn and Graubard 1998): not more than there are pictures, not fewer than
    there are victims, and as many as victims where all pictures are alike.
    """
    each = by_picture(table, column)
    share = float(each["value"].mean())
    of = _worth(each, share)
    return {**proportion(share * of, of), "rate": share}


def _worth(each: pd.DataFrame, share: float) -> float:
    by_group = each.groupby("group")["value"]
    sums, sizes = by_group.sum().to_numpy(), by_group.size().to_numpy()
    pictures, groups = len(each), len(sizes)
    if groups == pictures or groups == 1 or share in (0.0, 1.0):
        return groups
    apart = float(((sums - share * sizes) ** 2).sum()) * groups / (groups - 1) / pictures**2
    # With few victims their variance itself is uncertain: Student's quantiles instead of normal.
    doubt = float(t.ppf(0.975, pictures - 1) / t.ppf(0.975, groups - 1)) ** 2
    worth = doubt * share * (1 - share) / apart if apart > 0 else doubt * pictures
    return float(np.clip(worth, groups, pictures))


def compare(scores: pd.DataFrame, labels: list[str]) -> list[dict[str, Any]]:
    """Every attack against every later one: the mean difference over the same pictures (each a mean
    over trials) in every headline metric, with intervals."""
    names = [metric.name for metric in shown_in("headlines")]
    means = scores.groupby(["attack", *KEYS], sort=False)[names].mean()
    numbers = scores.assign(picture=picture_numbers(scores)).groupby(KEYS)["picture"].first()
    present = [label for label in labels if label in means.index.get_level_values("attack")]
    pairs = []
    for at, first in enumerate(present):
        for second in present[at + 1 :]:
            apart = (means.loc[first] - means.loc[second]).dropna().reset_index()
            if apart.empty:
                continue
            apart = apart.join(numbers, on=KEYS)
            entry: dict[str, Any] = {"first": first, "second": second}
            entry["pictures"] = count_pictures(apart)
            entry |= {name: _mean_with_interval(apart, name) for name in names}
            pairs.append(entry)
    return pairs


def population(scores: pd.DataFrame, baseline: str) -> list[dict[str, Any]]:
    """The attacked updates, the most exposed first: of each the closest reconstruction, and the
    largest share of labels and of pictures that any attack recovered and identified, over its
    trials."""
    attacked = scores[scores["attack"] != baseline]
    if attacked.empty:
        return []
    guesses = scores[scores["attack"] == baseline].groupby(VICTIM)["psnr"].mean()
    ranked = []
    for at, here in attacked.groupby(VICTIM):
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


def over_rounds(scores: pd.DataFrame, rounds: pd.DataFrame) -> list[dict[str, Any]]:
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
        row: dict[str, Any] = {"attack": attack, "round": round_}
        row["pictures"] = count_pictures(here)
        row |= {m.name: _mean_with_interval(here, m.name) for m in shown_in("headlines")}
        row["accuracy_before"] = accuracy.get(round_)
        rows.append(row)
    return rows


def _mean_with_interval(table: pd.DataFrame, column: str) -> dict[str, float | None]:
    each = by_picture(table, column)
    low, high = _interval(each)
    return {"mean": clean(each["value"].mean()), "low": clean(low), "high": clean(high)}


def label_accuracy(own: pd.DataFrame) -> dict[str, float] | None:
    """The share of labels recovered; None for attacks that recover none."""
    if own["label_recovered"].isna().all():
        return None
    return rate(own.assign(right=_right(own)), "right")


def label_chance(own: pd.DataFrame, classes: int) -> float | None:
    """What share of the labels somebody would have who named as many at random, each class as
    likely; of a large batch that is a lot, because labels are recovered as a multiset."""
    shares = []
    for _, rows in own.groupby([*VICTIM, "trial"]):
        named = int(rows["label_recovered"].notna().sum())
        counts = rows["label_true"].value_counts().to_numpy()
        hits = np.arange(named + 1)
        likely = binom.pmf(hits, named, 1 / classes)
        found = [float((likely * np.minimum(hits, count)).sum()) for count in counts]
        shares += [sum(found) / len(rows)] * len(rows)
    return clean(np.mean(shares)) if shares else None


def _label_share(rows: pd.DataFrame) -> float | None:
    """Of the attack that recovered most of a victim's labels; None where none recovers any."""
    claimed = rows["label_recovered"].notna().groupby(rows["attack"]).transform("any")
    if not claimed.any():
        return None
    return clean(_right(rows)[claimed].groupby(rows["attack"][claimed]).mean().max())


def _right(rows: pd.DataFrame) -> pd.Series:
    return (rows["label_recovered"] == rows["label_true"]).astype(float)


def _pair(key: Any) -> tuple[int, int]:
    return int(key[0]), int(key[1])


def clean(value: Any) -> float | None:
    """A number that JSON can hold, or None."""
    number = float(value)
    return number if np.isfinite(number) else None
