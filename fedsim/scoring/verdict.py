"""Verdicts: what the scores mean, in careful words, by these rules.

    BASELINE       the baseline itself, whatever it scores
    LEAKS          at least one picture at 30 dB or more, in place or once shifted, as the model
                   saw it or as it was before that was augmented, and 3 dB or more above the better
                   of the baseline and the best flat colour
    PARTIAL        a single picture stands out: 10 dB and 0.3 SSIM or more above the better of the
                   two, or 0.5 SSIM alone
    BASELINE       an attack that was done on every victim and by its ledger read nothing private
                   (no update, traffic, weights, statistics or labels): what it knows is no leak
    MIS-SPECIFIED  the canary failed: the protocol announced does not reproduce the updates
    INCOMPLETE     not every victim was scored in every trial, or not every picture beside the
                   baseline: less stands behind the scores than was asked for
    PARTIAL        on average above the better of baseline and best flat colour in PSNR (in place
                   or shifted) or SSIM, the 95 % interval of the paired difference wholly above
                   1 dB or 0.05, where more than one group of victims gives an interval; or pictures
                   told from a gallery of others as often as chance would less than once in a
                   thousand times
    NOT RECOVERED  otherwise: by this attack, at this budget
    NOT SCORED     the run was captured and nobody witnessed what its clients learned from: there
                   are reconstructions, and nothing to compare them with
    NO RESULT      nothing to score: its jobs failed, or none of its victims was observed

The first that holds counts: a picture that came back has leaked, whatever else is wrong, and
whatever the ledger says; where that names nothing private, the words say so. The
baseline is `prior_only`, which never sees the update, on the same image. Where there is none (an
eavesdropper knows too little to guess), LEAKS and the picture that stands out are held to the flat
colour, the latter also to 0.5 SSIM, and PARTIAL on average asks for an interval above 20 dB or 0.5
SSIM that is 1 dB above the flat colour. Every entry says how many ``victims`` stand behind it, and
``victims_of`` how many were asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fedsim.campaign.plan import baseline_label, victims
from fedsim.core.attack import BASELINE
from fedsim.core.metrics import METRICS
from fedsim.core.spec import Spec
from fedsim.scoring.canary import tolerance_of
from fedsim.scoring.recovery import (
    ORIGINAL,
    above_flat,
    above_free,
    beside_baseline,
    recovered,
    recovered_as_it_was,
    recovered_as_seen,
    stands_out,
)
from fedsim.scoring.statistics import (
    KEYS,
    clean,
    count_groups,
    count_pictures,
    describe,
    interval,
    label_accuracy,
    label_chance,
    rate,
)
from fedsim.scoring.wording import PARTIAL_DB, PARTIAL_SSIM, unscored_words, words_of

Try = tuple[int, int, int]  # round, client, trial
MARGINS = {"psnr": PARTIAL_DB, "psnr_registered": PARTIAL_DB, "ssim": PARTIAL_SSIM}
# Marks for where nobody guessed: flat colours reach 10 to 18 dB on photographs.
MARKS = {"psnr": 20.0, "ssim": 0.5}
PARTIAL_CHANCE = 1e-3
# Whatever says something of a client's pictures: the weights of a round hold the updates of those
# before it. An attack that read none of it knows what anybody knows.
LOOKS = frozenset(
    {"update", "traffic", "weights", "batch_statistics", "oracle_labels", "tampering"}
)
DECLINED = "declined"


@dataclass(frozen=True)
class Asked:
    """What a run was to show: victims, how often each was to be attacked, and which attack is the
    baseline."""

    victims: int
    trials: int
    baseline: str | None
    refused: int = 0  # of the victims that were chosen: they uploaded nothing
    excused: frozenset[Try] = frozenset()  # tries of an attack that were not needed

    @property
    def spared(self) -> int:
        """Victims on which nothing of an attack was needed."""
        tries = Counter((round_, client) for round_, client, _ in self.excused)
        return sum(count >= self.trials for count in tries.values())

    @classmethod
    def of(cls, scores: pd.DataFrame) -> Asked:
        """As if what is in the scores was all that was asked for."""
        known = BASELINE if (scores["attack"] == BASELINE).any() else None
        return cls(int(scores.groupby(["round", "client"]).ngroups), 1, known)

    def lacking(self, paired: pd.DataFrame) -> str | None:
        """What of it is not in the rows of one attack, beside those of the baseline; None where all
        is there."""
        trials = paired.groupby(["round", "client"])["trial"].nunique()
        needed = self.victims - self.spared
        if len(trials) < needed:
            return f"{needed - len(trials)} of {needed} victims could not be scored"
        tries = self.victims * self.trials - len(self.excused)
        if short := tries - int(trials.sum()):
            return f"{short} of {tries} trials could not be scored"
        if self.baseline is not None and paired["psnr_baseline"].isna().any():
            return "the baseline, which it is compared with, could not be scored on every picture"
        return None


def asked_of(spec: Spec, refused: Collection[tuple[int, int]] = ()) -> Asked:
    """What a spec asks for; whoever ``refused`` to upload gave nothing to attack."""
    chosen = victims(spec)
    left = [victim for victim in chosen if victim not in refused]
    trials = spec.audit.trials
    return Asked(len(left), trials, baseline_label(spec), len(chosen) - len(left))


def summarise(
    scores: pd.DataFrame,
    spec: Spec,
    labels: list[str],
    ledgers: dict[str, list[str]],
    failed: list[dict[str, str]],
    chances: Mapping[str, Mapping[str, Any]] | None = None,
    asked: Asked | None = None,
    classes: int | None = None,
    unscored: Mapping[str, Mapping[str, Any]] | None = None,
    excused: Mapping[str, frozenset[Try]] | None = None,
) -> list[dict[str, Any]]:
    """One entry per attack, in the order of the spec; the baseline last. ``ledgers`` says what each
    attack read (one that is not in there may have read anything), ``chances`` what its
    identification is to be read against; without ``asked``, all that the scores hold was;
    ``classes`` says of how many classes labels were named, ``unscored`` what each attack made where
    there is no truth at all, ``excused`` which tries of an attack were not needed."""
    whole = asked or Asked.of(scores)
    baseline = scores[scores["attack"] == whole.baseline]
    entries = []
    for label in labels:
        asked = replace(whole, excused=(excused or {}).get(label, frozenset()))
        rows, ledger = scores[scores["attack"] == label], ledgers.get(label)
        if unscored is not None and label in unscored:
            entries.append(_not_scored(label, ledger or [], unscored[label], asked))
        elif rows.empty:
            own = [job for job in failed if job["attack"] == label]
            entries.append(_no_result(label, ledger or [], own, asked))
        else:
            chance = (chances or {}).get(label)
            entries.append(_one(rows, baseline, label, ledger, spec, chance, asked, classes))
    return entries


def _no_result(
    label: str, ledger: list[str], failed: list[dict[str, str]], asked: Asked
) -> dict[str, Any]:
    """Whether an attack declined every victim is told apart from one that is not done: the first is
    what it found out, the second says nothing."""
    kinds = [job.get("kind", "fault") for job in failed]
    worst_first = sorted(failed, key=lambda job: job.get("kind") == DECLINED)
    why = "none of its victims was observed and could be scored."
    if asked.refused and not asked.victims:
        why = f"the guards of all {asked.refused} victims kept them from uploading."
    words = f"{label} gave no result: {worst_first[0]['reason'] if failed else why}"
    needed = asked.victims - asked.spared
    nothing_else = set(kinds) <= {DECLINED} and len(kinds) >= needed
    all_declined = nothing_else and bool(failed or asked.spared)
    if asked.spared and not needed:
        words = f"{label} was not needed: all its victims had been recovered exactly."
    about = {"images": 0, "victims": 0, "victims_of": needed, "ledger": ledger}
    about |= {"refused": asked.refused, "spared": asked.spared}
    about |= {"declined": all_declined, "kinds": sorted(set(kinds))}
    return {"attack": label, "verdict": "NO RESULT", **about, "words": words}


def _not_scored(
    label: str, ledger: list[str], made: Mapping[str, Any], asked: Asked
) -> dict[str, Any]:
    """What an attack made, and no word on whether it is right."""
    entry = {
        "attack": label,
        "verdict": "BASELINE" if label == asked.baseline else "NOT SCORED",
        "is_baseline": label == asked.baseline,
        "images": 0,
        "victims_of": asked.victims,
        "refused": asked.refused,
        "ledger": ledger,
        **made,
    }
    return entry | {"words": unscored_words(entry)}


def _one(
    rows: pd.DataFrame,
    baseline: pd.DataFrame,
    label: str,
    ledger: list[str] | None,
    spec: Spec,
    chance: Mapping[str, Any] | None,
    asked: Asked,
    classes: int | None,
) -> dict[str, Any]:
    paired = beside_baseline(rows, baseline)
    told = ledger is None or not LOOKS.isdisjoint(ledger)
    back, stand_out = count_pictures(paired[recovered(paired)]), _standing_out(paired)
    looked = told or bool(back or stand_out)  # what came back came from somewhere
    same = baseline.merge(rows[KEYS].drop_duplicates(), on=KEYS)  # pictures that both have
    canary, labels = rows["canary"].astype(float), label_accuracy(rows)
    tolerance = tolerance_of(spec.train)
    entry: dict[str, Any] = {
        "attack": label,
        "images": len(rows),
        "pictures": count_pictures(rows),
        "recovered": back,
        "stand_out": stand_out,
        "is_baseline": label == asked.baseline,
        "looked": looked,
        "untold": looked and not told,
        "victims": int(rows.groupby(["round", "client"]).ngroups),
        "victims_of": asked.victims - asked.spared,
        "spared": asked.spared,
        "refused": asked.refused,
        "groups": count_groups(rows),
        "metrics": {m: describe(rows, m) for m in METRICS},
        "baseline": {m: _mean(same[m]) for m in METRICS},
        "label_accuracy": labels["rate"] if labels else None,
        "labels": labels and {**labels, **_by_chance(rows, classes)},
        "identification": _identification(rows, chance),
        "canary": {
            "ok": bool(canary.notna().all() and (canary <= tolerance).all()),
            "worst": clean(canary.max()),
            "tolerance": tolerance,
        },
        "seconds": clean(rows.groupby(["round", "client", "trial"])["seconds"].first().sum()),
        "ledger": ledger or [],
    }
    if spec.train.augment:
        entry["originals"] = _originals(paired)
    if (features := _features(rows)) is not None:
        entry["features"] = features
    entry["claims"] = bool(rows["claimed"].fillna(True).any()) if "claimed" in rows else True
    if label == asked.baseline:
        entry["verdict"] = "BASELINE"
    else:
        entry["lacking"] = asked.lacking(paired)
        entry["verdict"] = _verdict(entry, paired, asked)
    entry["words"] = words_of(entry)
    return entry


def _by_chance(rows: pd.DataFrame, classes: int | None) -> dict[str, float | None]:
    """What the share of labels is to be read against, where the number of classes is known."""
    return {} if classes is None else {"by_chance": label_chance(rows, classes)}


def _verdict(entry: dict[str, Any], paired: pd.DataFrame, asked: Asked) -> str:
    if entry["recovered"]:
        return "LEAKS"
    if entry["stand_out"]:
        return "PARTIAL"
    if not entry["looked"]:  # the jobs that failed may have: what is not done is no guess yet
        return "INCOMPLETE" if entry["lacking"] else "BASELINE"
    if not entry["canary"]["ok"]:
        return "MIS-SPECIFIED"
    if entry["lacking"]:
        return "INCOMPLETE"
    better = _above_baseline if asked.baseline is not None else _above_marks
    if better(paired):
        return "PARTIAL"
    identification = entry["identification"]
    if identification is not None and identification["by_chance"] < PARTIAL_CHANCE:
        return "PARTIAL"
    return "NOT RECOVERED"


def _above_baseline(paired: pd.DataFrame) -> bool:
    """Whether the mean difference to what is had for nothing is surely more than its margin."""
    for metric, margin in MARGINS.items():
        gain = above_free(paired, metric)
        if _surely(paired.assign(gain=gain), margin):
            return True
    return False


def _above_marks(paired: pd.DataFrame) -> bool:
    """The same where nobody guessed: against marks, and against the best flat colour."""
    flat = paired.assign(gain=above_flat(paired))
    if flat["gain"].notna().any() and not _surely(flat, PARTIAL_DB):
        return False
    return any(_surely(paired.assign(gain=paired[m]), mark) for m, mark in MARKS.items())


def _surely(table: pd.DataFrame, margin: float) -> bool:
    """Whether the 95 % interval of the mean ``gain`` is above a margin. One group of victims has no
    interval: its mean may be chance."""
    known = table.dropna(subset=["gain"])
    return count_groups(known) > 1 and interval(known, "gain")[0] > margin


def _standing_out(paired: pd.DataFrame) -> dict[str, Any] | None:
    """How many pictures stand out, in any trial, and where the closest of them is."""
    found = paired[stands_out(paired)]
    if found.empty:
        return None
    first = found.sort_values("psnr").iloc[-1]
    place = ", ".join(f"{key} {first[key]}" for key in KEYS)
    return {
        **{"pictures": count_pictures(found), "of": count_pictures(paired), "where": place},
        **{"psnr": float(first["psnr"]), "ssim": float(first["ssim"])},
    }


def _originals(paired: pd.DataFrame) -> dict[str, Any]:
    """Where clients augment: how many pictures came back as the model saw them, and how many as
    they were before, with the closest of each."""
    seen, before = paired["psnr"].astype(float), paired[ORIGINAL].astype(float)
    return {
        "seen": count_pictures(paired[recovered_as_seen(paired)]),
        "originals": count_pictures(paired[recovered_as_it_was(paired)]),
        "of": count_pictures(paired),
        "closest_seen": clean(seen.max()),
        "closest_original": clean(before.max()),
        "mean_original": _mean(before),
    }


def _features(rows: pd.DataFrame) -> dict[str, Any] | None:
    """How close claimed features are to those the head read, and what a grey picture's are."""
    if "features" not in rows or rows["features"].isna().all():
        return None
    found, free = rows["features"].astype(float), rows["features_free"].astype(float)
    return {"mean": _mean(found), "least": clean(found.min()), "free": _mean(free),
            "of": count_pictures(rows)}  # fmt: skip


def _identification(rows: pd.DataFrame, chance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How often a reconstruction told its own picture from the gallery's, against chance."""
    looked_for = rows.dropna(subset=["identified"])
    if chance is None or looked_for.empty:
        return None
    return {**chance, **rate(looked_for, "identified"), "of": count_pictures(looked_for)}


def _mean(values: pd.Series) -> float | None:
    return None if values.isna().all() else clean(values.astype(float).mean())
