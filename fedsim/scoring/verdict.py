"""Verdicts: what the scores mean, in careful words, by these rules.

    LEAKS          at least one image at 30 dB or more, and at least 3 dB above the baseline
    MIS-SPECIFIED  the canary failed: the protocol announced does not reproduce the updates
    INCOMPLETE     not every victim was scored in every trial, or not every picture beside the
                   baseline: less stands behind the scores than was asked for
    PARTIAL        on average above the baseline in PSNR or SSIM, the 95 % interval of the paired
                   difference wholly above 1 dB or 0.05; or pictures told from a gallery of others
                   as often as chance would less than once in a thousand times
    NOT RECOVERED  otherwise: by this attack, at this budget
    NO RESULT      nothing to score: its jobs failed, or none of its victims was observed
    BASELINE       the baseline itself, whatever it scores

The first that holds counts: a picture that came back has leaked, whatever else is wrong. The
baseline is `prior_only`, which never sees the update, on the same image; where there is none (an
eavesdropper knows too little to guess), LEAKS asks for the 30 dB alone. Every entry says how many
``victims`` stand behind it, and ``victims_of`` how many were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsim.campaign.plan import baseline_label, victims
from fedsim.core.attack import BASELINE
from fedsim.core.metrics import METRICS
from fedsim.core.spec import Spec
from fedsim.scoring.canary import CANARY_TOLERANCE
from fedsim.scoring.statistics import (
    KEYS,
    bootstrap,
    clean,
    count_groups,
    count_pictures,
    describe,
    label_accuracy,
    rate,
)

RECOVERED_DB, ABOVE_BASELINE_DB = 30.0, 3.0
PARTIAL_DB, PARTIAL_SSIM = 1.0, 0.05
PARTIAL_CHANCE = 1e-3


@dataclass(frozen=True)
class Asked:
    """What a run was to show: victims, how often each was to be attacked, and which attack is the
    baseline."""

    victims: int
    trials: int
    baseline: str | None

    @classmethod
    def of(cls, scores: pd.DataFrame) -> Asked:
        """As if what is in the scores was all that was asked for."""
        known = BASELINE if (scores["attack"] == BASELINE).any() else None
        return cls(int(scores.groupby(["round", "client"]).ngroups), 1, known)

    def lacking(self, paired: pd.DataFrame) -> str | None:
        """What of it is not in the rows of one attack, beside those of the baseline; None where all
        is there."""
        trials = paired.groupby(["round", "client"])["trial"].nunique()
        if len(trials) < self.victims:
            return f"{self.victims - len(trials)} of {self.victims} victims could not be scored"
        if short := int((self.trials - trials).sum()):
            return f"{short} of {self.victims * self.trials} trials could not be scored"
        if self.baseline is not None and paired["psnr_baseline"].isna().any():
            return "the baseline, which it is compared with, could not be scored on every picture"
        return None


def asked_of(spec: Spec) -> Asked:
    """What a spec asks for."""
    return Asked(len(victims(spec)), spec.audit.trials, baseline_label(spec))


def summarise(
    scores: pd.DataFrame,
    spec: Spec,
    labels: list[str],
    ledgers: dict[str, list[str]],
    failed: list[dict[str, str]],
    chances: Mapping[str, Mapping[str, Any]] | None = None,
    asked: Asked | None = None,
) -> list[dict[str, Any]]:
    """One entry per attack, in the order of the spec; the baseline last. ``chances`` says of each
    attack what its identification is to be read against; without ``asked``, all that the scores
    hold was."""
    asked = asked or Asked.of(scores)
    baseline = scores[scores["attack"] == asked.baseline]
    entries = []
    for label in labels:
        rows, ledger = scores[scores["attack"] == label], ledgers.get(label, [])
        if rows.empty:
            reasons = [job["reason"] for job in failed if job["attack"] == label]
            entries.append(_no_result(label, ledger, reasons, asked))
        else:
            chance = (chances or {}).get(label)
            entries.append(_one(rows, baseline, label, ledger, spec.seed, chance, asked))
    return entries


def _no_result(label: str, ledger: list[str], reasons: list[str], asked: Asked) -> dict[str, Any]:
    why = reasons[0] if reasons else "none of its victims was observed and could be scored."
    words = f"{label} gave no result: {why}"
    about = {"images": 0, "victims": 0, "victims_of": asked.victims, "ledger": ledger}
    return {"attack": label, "verdict": "NO RESULT", **about, "words": words}


def _one(
    rows: pd.DataFrame,
    baseline: pd.DataFrame,
    label: str,
    ledger: list[str],
    seed: int,
    chance: Mapping[str, Any] | None,
    asked: Asked,
) -> dict[str, Any]:
    paired = rows.merge(baseline, on=KEYS, how="left", suffixes=("", "_baseline"))
    same = baseline.merge(rows[KEYS].drop_duplicates(), on=KEYS)  # pictures that both have
    canary, labels = rows["canary"].astype(float), label_accuracy(rows)
    entry: dict[str, Any] = {
        "attack": label,
        "images": len(rows),
        "pictures": count_pictures(rows),
        "recovered": _recovered(paired),
        "victims": int(rows.groupby(["round", "client"]).ngroups),
        "victims_of": asked.victims,
        "groups": count_groups(rows),
        "metrics": {m: describe(rows, m, seed) for m in METRICS},
        "baseline": {m: _mean(same[m]) for m in METRICS},
        "label_accuracy": labels["rate"] if labels else None,
        "labels": labels,
        "identification": _identification(rows, chance),
        "canary": {
            "ok": bool(canary.notna().all() and (canary <= CANARY_TOLERANCE).all()),
            "worst": clean(canary.max()),
            "tolerance": CANARY_TOLERANCE,
        },
        "seconds": clean(rows.groupby(["round", "client", "trial"])["seconds"].first().sum()),
        "ledger": ledger,
    }
    if label != asked.baseline:
        entry["lacking"] = asked.lacking(paired)
        entry["verdict"] = _verdict(entry, paired, seed)
    else:
        entry["verdict"] = "BASELINE"
    entry["words"] = _words(entry)
    return entry


def _verdict(entry: dict[str, Any], paired: pd.DataFrame, seed: int) -> str:
    if entry["recovered"]:
        return "LEAKS"
    if not entry["canary"]["ok"]:
        return "MIS-SPECIFIED"
    if entry["lacking"]:
        return "INCOMPLETE"
    for metric, margin in (("psnr", PARTIAL_DB), ("ssim", PARTIAL_SSIM)):
        paired["gain"] = paired[metric] - paired[f"{metric}_baseline"]
        compared = paired.dropna(subset=["gain"])
        if len(compared) and bootstrap(compared, "gain", seed)[0] > margin:
            return "PARTIAL"
    identification = entry["identification"]
    if identification is not None and identification["by_chance"] < PARTIAL_CHANCE:
        return "PARTIAL"
    return "NOT RECOVERED"


def _identification(rows: pd.DataFrame, chance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How often a reconstruction told its own picture from the gallery's, against chance."""
    looked_for = rows.dropna(subset=["identified"])
    if chance is None or looked_for.empty:
        return None
    return {**chance, **rate(looked_for, "identified"), "of": count_pictures(looked_for)}


def _recovered(paired: pd.DataFrame) -> int:
    """How many distinct pictures came back, in any trial of any round, by the rule for LEAKS."""
    gain = paired["psnr"] - paired["psnr_baseline"]
    hit = (paired["psnr"] >= RECOVERED_DB) & ((gain >= ABOVE_BASELINE_DB) | gain.isna())
    return count_pictures(paired[hit])


def _words(entry: dict[str, Any]) -> str:
    psnr, name = entry["metrics"]["psnr"], entry["attack"]
    mean, best = psnr["mean"], psnr["worst_case"]
    base = entry["baseline"]["psnr"]
    against = f" (a guess without the update: {base:.1f} dB)" if base is not None else ""
    behind = f"{entry['victims']} of {entry['victims_of']} victims"
    return {
        "LEAKS": f"{name} reconstructed the clients' pictures: {mean:.1f} dB on average, "
        f"{best:.1f} dB for the worst-hit client{against}; {behind}.",
        "PARTIAL": f"{name} learned more than a guess, without a clear picture: {mean:.1f} dB on "
        f"average{against}; {behind}.",
        "NOT RECOVERED": f"{name} did not recover the pictures at this budget: {mean:.1f} dB on "
        f"average{against}; {behind}. A stronger attack may.",
        "INCOMPLETE": f"{name} is not done, because {entry.get('lacking')}: on {behind} no clear "
        f"picture came back, {mean:.1f} dB on average{against}, which says nothing about the rest.",
        "MIS-SPECIFIED": f"{name} attacked a protocol that is not the one the clients followed: "
        f"their true batches, replayed, do not give their updates. Its scores say nothing about "
        f"safety.",
        "BASELINE": f"A guess that never sees the update scores {mean:.1f} dB; {behind}.",
    }[entry["verdict"]]


def _mean(values: pd.Series) -> float | None:
    return None if values.isna().all() else clean(values.astype(float).mean())
