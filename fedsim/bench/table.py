"""Table of a benchmark: over seeds and pictures, with intervals; what no other cell beats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedsim.bench.doubts import gathered, marks_of
from fedsim.campaign.suites import NAIVE
from fedsim.core.metrics import METRICS, shown_in
from fedsim.report.headline import rank_of
from fedsim.scoring.recovery import beside_baseline, recovered
from fedsim.scoring.statistics import by_picture, count_pictures, interval

CELL = ["defense", "strength"]
KEYS = [*CELL, "attack"]
PICTURE = ["seed", "round", "client", "image"]


def aggregate(pictures: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """One row per defense, strength and attack. Of an attack that ran both ways the means are the
    stronger one's; a picture that either recovered is recovered, and so is the worst case."""
    baselines = set(outcomes.loc[outcomes["baseline"], "attack"])
    ways = []
    hits: dict[tuple[Any, ...], list[pd.Series]] = {}  # by the picture that a row is of
    for (defense, strength, attack), rows in outcomes.groupby(KEYS, sort=False):
        if rows["baseline"].all():
            continue
        cell = pictures[(pictures["defense"] == defense) & (pictures["strength"] == strength)]
        own, guesses = cell[cell["attack"] == attack], cell[cell["attack"].isin(baselines)]
        name = str(attack).removesuffix(NAIVE)
        found = _hits(own, guesses).set_axis(_known_as(own))
        hits.setdefault((defense, strength, name), []).append(found)
        ways.append(
            {
                "defense": defense,
                "strength": strength,
                "attack": name,
                "adaptive": not str(attack).endswith(NAIVE),
                **_leakage(own),
                "doubts": gathered(rows["doubt"]),
                "flags": _flags(rows),
                "victims": int(rows["victims"].sum()),
                "victims_of": int(rows["victims_of"].sum()),
                **_cost(rows),
            }
        )
    both = pd.DataFrame(ways)
    rank = both.assign(psnr=both["psnr"].astype(float).fillna(-np.inf))  # declined: comes last
    chosen = both.loc[rank.groupby(KEYS, sort=False)["psnr"].idxmax()]
    index = pd.MultiIndex.from_frame(chosen[KEYS])
    by_way = {
        f"psnr_{name}": both[both["adaptive"] == way]
        .set_index(KEYS)["psnr"]
        .reindex(index)
        .to_numpy()
        for name, way in (("naive", False), ("adaptive", True))
    }
    # Either way's trouble is the cell's: the way that failed may have been the stronger.
    doubts = both.groupby(KEYS, sort=False)["doubts"].agg(gathered).reindex(index).to_numpy()
    worst = both.groupby(KEYS, sort=False)["psnr_worst"].max().reindex(index).to_numpy()
    either: dict[str, Any] = {
        "doubts": doubts,
        "psnr_worst": worst,
        "recovered": [_share_recovered(hits[key]) for key in index],
        "verdict": [_strongest(outcomes, *key) for key in index],
    }
    table = chosen.assign(**by_way, **either)
    return table.drop(columns="adaptive").reset_index(drop=True)


def _flags(rows: pd.DataFrame) -> str:
    """The flags that a suite raised in any seed, each once."""
    told: list[str] = list(rows["flags"].fillna("")) if "flags" in rows else []
    return ", ".join(dict.fromkeys(f for words in told for f in words.split(", ") if f))


def _strongest(outcomes: pd.DataFrame, defense: str, strength: str, attack: str) -> str:
    """The verdicts of an attack on a cell, each seed's the stronger of its ways."""
    here = (outcomes["defense"] == defense) & (outcomes["strength"] == strength)
    own = outcomes[here & outcomes["attack"].isin([attack, f"{attack}{NAIVE}"])]
    by_seed = [list(rows) for _, rows in own.groupby("seed", sort=False)["verdict"]]
    return ", ".join(dict.fromkeys(min(rows, key=_rank) for rows in by_seed))


def _rank(verdict: str) -> int:
    return rank_of(verdict, declined=True)


def _share_recovered(hits: list[pd.Series]) -> float:
    """The share of pictures that any trial of any way recovered."""
    each = pd.concat(hits) if hits else pd.Series(dtype=bool)
    return float(each.groupby(level=0).any().mean()) if len(each) else 0.0


def _hits(own: pd.DataFrame, guesses: pd.DataFrame) -> pd.Series:
    """Which rows are recovered, by the rule of LEAKS."""
    keys = [name for name in PICTURE if name in own]
    return recovered(beside_baseline(own, guesses, keys)).set_axis(own.index)


def _leakage(pictures: pd.DataFrame) -> dict[str, Any]:
    """Means over pictures and seeds, each picture the mean of its trials; the interval resamples
    victims. The worst case is that of any trial."""
    averaged = (*METRICS, "identified")
    nothing = {"pictures": 0, **dict.fromkeys(averaged)}
    if pictures.empty:
        return {**nothing, "psnr_low": None, "psnr_high": None, "psnr_worst": None}
    rows = _apart(pictures)
    means = {
        name: float(by_picture(rows, name)["value"].mean()) if rows[name].notna().any() else None
        for name in averaged
    }
    low, high = interval(rows, "psnr")
    right = rows.assign(right=(rows["label_true"] == rows["label_recovered"]).astype(float))
    jobs = pictures.groupby(["seed", "round", "client", "trial"])["seconds"].first()
    return {
        "pictures": count_pictures(rows),
        **means,
        "psnr_low": low,
        "psnr_high": high,
        "psnr_worst": float(rows["psnr"].astype(float).max()),
        "labels": float(by_picture(right, "right")["value"].mean()),
        "attack_seconds": float(jobs.sum()),
    }


def _apart(pictures: pd.DataFrame) -> pd.DataFrame:
    """Rounds of different seeds are different ones. So are pictures, unless their pixels say that
    they are the same: seeds deal out one data set, and a picture counts once."""
    seed = pictures["seed"].astype(str) + "/"
    apart = pictures.assign(round=seed + pictures["round"].astype(str))
    if "picture" in pictures:
        known = pictures["picture"].notna()
        apart["picture"] = (seed + pictures["picture"].astype(str)).where(known)
    if {"digest", "picture"} <= set(pictures):
        apart["picture"] = pictures["digest"].where(pictures["digest"].notna(), apart["picture"])
    return apart


def _known_as(pictures: pd.DataFrame) -> pd.Index:
    """What the picture of each row is known by, whichever attack it is of."""
    rows = _apart(pictures)
    places = rows[[name for name in ("round", "client", "image") if name in rows]]
    words = places.astype(str).agg(" ".join, axis=1) if len(rows) else pd.Series(dtype=str)
    if "picture" in rows:
        words = rows["picture"].astype(str).where(rows["picture"].notna(), words)
    return pd.Index(words)


def _cost(rows: pd.DataFrame) -> dict[str, Any]:
    """Over seeds: the mean accuracy with its least and largest, and means of the rest."""
    accuracy = rows["accuracy"].astype(float)
    means = {
        name: float(rows[name].astype(float).mean()) if rows[name].notna().any() else None
        for name in ("rounds_to_target", "bytes_a_round", "upload_bytes", "round_seconds")
    }
    epsilon = rows["epsilon"].astype(float)
    return {
        "seeds": int(rows["seed"].nunique()),
        "accuracy": float(accuracy.mean()) if accuracy.notna().any() else None,
        "accuracy_low": float(accuracy.min()) if accuracy.notna().any() else None,
        "accuracy_high": float(accuracy.max()) if accuracy.notna().any() else None,
        **means,
        "epsilon": float(epsilon.max()) if epsilon.notna().any() else None,
    }


def by_cell(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry per defense and strength: the strongest attack's leakage, the accuracy, what is in
    doubt of any attack, and whether no other cell beats it in both."""
    rank = table.assign(ssim=table["ssim"].astype(float).fillna(-np.inf))
    strongest = table.loc[rank.groupby(CELL, sort=False)["ssim"].idxmax()]
    leakage = [metric.name for metric in shown_in("headlines")]
    columns = [*CELL, "attack", *leakage, "recovered", "accuracy", "upload_bytes"]
    doubts = table.groupby(CELL, sort=False)["doubts"].agg(gathered)
    cells: list[dict[str, Any]] = [
        {str(k): v for k, v in row.items()} for row in strongest[columns].to_dict("records")
    ]
    for cell in cells:
        known = {name: cell[name] for name in (*leakage, "accuracy")}
        cell |= {name: None if pd.isna(v) else float(v) for name, v in known.items()}
        cell["doubts"] = str(doubts[cell["defense"], cell["strength"]])
        cell["front"] = False
    # A number in doubt neither beats others nor stands for what cannot be beaten.
    sound = [cell for cell in cells if not cell["doubts"] and cell["ssim"] is not None]
    front = pareto(
        np.array([c["accuracy"] for c in sound], dtype=float),
        np.array([c["ssim"] for c in sound], dtype=float),
    )
    for cell, best in zip(sound, front.tolist(), strict=True):
        cell["front"] = best
    return cells


def pareto(accuracy: np.ndarray, leakage: np.ndarray) -> np.ndarray:
    """Which cells no other beats in both: at least as accurate and leaking at most as much."""
    front = []
    for a, s in zip(accuracy, leakage, strict=True):
        better = (accuracy >= a) & (leakage <= s) & ((accuracy > a) | (leakage < s))
        front.append(not bool(better.any()))
    return np.array(front, dtype=bool)


def as_markdown(table: pd.DataFrame) -> str:
    """Defenses down, attacks across: PSNR of the stronger way with its interval, naive in brackets,
    and marks where it is in doubt; then what the defense costs."""
    attacks = list(dict.fromkeys(table["attack"]))
    head = ["defense", "strength", *[f"{a}, dB" for a in attacks]]
    head += ["recovered", "accuracy", "KB a client", "epsilon"]
    flagged = "flags" in table and bool(table["flags"].any())
    head += ["flags"] if flagged else []
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (defense, strength), rows in table.groupby(CELL, sort=False):
        cells = rows.set_index("attack")
        shown = [_leaked(cells.loc[a]) if a in cells.index else "declined" for a in attacks]
        first = rows.iloc[0]
        recovered = f"{100 * rows['recovered'].max():.0f} %"
        sent = first["upload_bytes"]
        size = "–" if pd.isna(sent) else f"{sent / 1024:.0f}"
        epsilon = "" if pd.isna(first["epsilon"]) else f"{first['epsilon']:.3g}"
        words = [str(defense), str(strength), *shown, recovered, _accuracy(first), size, epsilon]
        words += [_flags(rows)] if flagged else []
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _leaked(row: pd.Series) -> str:
    marks = f" {marks_of(row['doubts'])}" if row["doubts"] else ""
    if pd.isna(row["psnr"]):
        return f"no result{marks}" if row["doubts"] else "declined"
    interval = f" [{row['psnr_low']:.1f}, {row['psnr_high']:.1f}]"
    if row["psnr_low"] == row["psnr_high"]:
        interval = ""
    if row["victims"] < row["victims_of"]:
        interval += f", {row['victims']} of {row['victims_of']} victims"
    if pd.isna(row["psnr_naive"]):
        return f"{row['psnr']:.1f}{interval}{marks}"
    adaptive = "–" if pd.isna(row["psnr_adaptive"]) else f"{row['psnr_adaptive']:.1f}"
    return f"{adaptive} ({row['psnr_naive']:.1f}){interval}{marks}"


def _accuracy(row: pd.Series) -> str:
    if pd.isna(row["accuracy"]):
        return ""
    mean = f"{100 * row['accuracy']:.0f} %"
    if row["seeds"] == 1:
        return mean
    return f"{mean} ({100 * row['accuracy_low']:.0f} to {100 * row['accuracy_high']:.0f})"
