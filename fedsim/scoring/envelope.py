"""Envelope: what a suite of attacks comes to, picture by picture.

The *worst case* takes of every picture the member whose reconstruction is closest: one that came
back, wherever it lies, before all that did not, and one that somebody claims before the grey that
stands for none. The guess is one of them. It is chosen with the truth, after the fact, and no
attacker could: it is an upper envelope for whoever must protect the picture. Beside it stands what
an attacker would have *picked*, of each victim the reconstruction that best explains the update by
what the attacker itself can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsim.campaign.jobs import Job
from fedsim.campaign.plan import baseline_label, roles, victims
from fedsim.campaign.suites import Role, cast_of
from fedsim.core.attack import Fit
from fedsim.core.metrics import METRICS
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.scoring.flags import flags_of
from fedsim.scoring.recovery import beside_baseline, recovered
from fedsim.scoring.scores import CLAIMED, results_of
from fedsim.scoring.statistics import (
    KEYS,
    VICTIM,
    by_picture,
    clean,
    count_pictures,
    interval,
    label_accuracy,
)
from fedsim.scoring.verdict import Try

_SHOWN = [*METRICS, "identified", "label_true", "label_recovered", "seconds", "canary", "digest"]
PICKED = ["psnr", "psnr_registered", "ssim", "lpips", "fft2d", "identified", "label_recovered"]
_ORDER = ["LEAKS", "PARTIAL", "MIS-SPECIFIED", "INCOMPLETE", "NOT RECOVERED"]
_ORDER += ["NOT SCORED", "NO RESULT"]


@dataclass(frozen=True)
class Weighed:
    """One finished try of a member, how well it fits, and how many pictures it is of."""

    job: Job
    fit: Fit
    pictures: int = 1


def envelope_of(run: Run, jobs: list[Job], scores: pd.DataFrame) -> pd.DataFrame:
    """One row for each true picture: the closest reconstruction of any member, and the picked one
    beside it. Empty where the spec names no suite."""
    spec, played = run.spec, roles(run.spec)
    guess = baseline_label(spec)
    members = [label for label, role in played.items() if not role.sample]
    counted = [*members, *([guess] if guess else [])]
    own = scores[scores["attack"].isin(counted)]
    if not members or own.empty:
        return pd.DataFrame()
    own = own.reset_index(drop=True)
    hits = recovered(beside_baseline(own, own[own["attack"] == guess])).set_axis(own.index)
    own = own.assign(recovered=hits)
    closest = _closest(own)
    tries = weighed((job for job in jobs if job.label in counted), run.spec.seed, played)
    picked = _picked_rows(own, tries)
    beside = picked.set_index(KEYS)[["attack", "trial", *PICKED, "recovered"]]
    names = {"attack": "picked", **{n: f"picked_{n}" for n in ("trial", *PICKED, "recovered")}}
    kept = [*KEYS, "picture", "attack", "trial", *_SHOWN, "recovered"]
    return closest[kept].join(beside.rename(columns=names), on=KEYS).reset_index(drop=True)


def _closest(own: pd.DataFrame) -> pd.DataFrame:
    """Of every picture the row that shows most of it."""
    claims = own[CLAIMED].fillna(True).astype(bool) if CLAIMED in own else True
    by_rank = own.assign(claims=claims).sort_values(
        ["recovered", "claims", "psnr"], ascending=False, kind="stable"
    )
    return own.loc[by_rank.drop_duplicates(KEYS).sort_values(KEYS).index]


def marked(scores: pd.DataFrame, envelope: pd.DataFrame) -> pd.DataFrame:
    """The scores, with two columns more: whether a row is the worst case of its picture, and
    whether it is what the attacker would have picked."""
    names = pd.MultiIndex.from_frame(scores[[*KEYS, "attack", "trial"]])
    for column, attack, trial in (
        ("worst_case", "attack", "trial"),
        ("picked", "picked", "picked_trial"),
    ):
        chosen = pd.MultiIndex.from_frame(envelope[[*KEYS, attack, trial]].dropna())
        scores = scores.assign(**{column: names.isin(chosen)})
    return scores


def weighed(jobs: Iterable[Job], seed: int, played: Mapping[str, Role]) -> list[Weighed]:
    """The finished tries whose fit is known, the cheaper first, without the check of the budget."""
    chosen = [job for job in jobs if job.judged and not _is_sample(played, job)]
    return [
        Weighed(job, result.fit, len(result.images))
        for job, result in results_of(chosen, seed)
        if result.fit is not None
    ]


def _is_sample(played: Mapping[str, Role], job: Job) -> bool:
    return job.label in played and played[job.label].sample


def _picked_rows(own: pd.DataFrame, tries: Iterable[Weighed]) -> pd.DataFrame:
    """The rows of what the attacker would have picked, victim by victim."""
    best: dict[tuple[int, int], Weighed] = {}
    for one in tries:
        victim = (one.job.round, one.job.client)
        if victim not in best or one.fit.distance < best[victim].fit.distance:
            best[victim] = one
    rows = []
    for _, each in own.groupby(VICTIM, sort=False):
        chosen = best.get((int(each["round"].iloc[0]), int(each["client"].iloc[0])))
        if chosen is not None:
            mine = (each["attack"] == chosen.job.label) & (each["trial"] == chosen.job.trial)
            rows.append(each[mine])
    return pd.concat(rows) if rows else own.iloc[:0]


def suite_account(
    run: Run,
    jobs: list[Job],
    scores: pd.DataFrame,
    envelope: pd.DataFrame,
    verdicts: list[dict[str, Any]],
    excused: Mapping[str, frozenset[Try]],
) -> dict[str, Any] | None:
    """What the summary says of a suite; None where the spec names none."""
    spec = run.spec
    cast = cast_of(spec)
    if cast is None:
        return None
    played, guess = roles(spec), baseline_label(spec)
    by_label = {entry["attack"]: entry for entry in verdicts}
    members = [_member(label, role, by_label, excused) for label, role in played.items()]
    tries = weighed(jobs, spec.seed, played)
    told = [by_label[n] for n, role in played.items() if n in by_label and not role.sample]
    worst, picked = _described(envelope, ""), _described(envelope, "picked_")
    return {
        "version": cast.suite.version,
        "exhaustive": cast.exhaustive,
        "verdict": _verdict(told),
        "words": _words(cast.suite.version, worst, picked, by_label.get(guess or "", {})),
        "members": members,
        "missing": dict(cast.missing),
        "evaluations": _evaluations(scores, played),
        "evaluations_at_most": sum(m["evaluations"] for m in members if not m["check"]),
        "envelope": {**worst, "labels": _most_labels(told)},
        "picked": picked,
        "by_client": _by_client(envelope),
        "flags": flags_of(cast, played, scores, envelope, told, tries, excused, guess),
    }


def _verdict(entries: Sequence[Mapping[str, Any]]) -> str:
    """The strongest that any member came to. One that crashed everywhere may have been it."""
    known = [entry for entry in entries if entry["verdict"] in _ORDER]
    if all(entry["verdict"] == "NO RESULT" for entry in known):
        return "NO RESULT"
    met = ["INCOMPLETE" if _is_undone(entry) else entry["verdict"] for entry in known]
    return min(met, key=_ORDER.index)


def _is_undone(entry: Mapping[str, Any]) -> bool:
    """Whether a member has no result though it did not decline, and somebody was there."""
    nobody = bool(entry.get("refused")) and not entry.get("victims_of")
    return entry["verdict"] == "NO RESULT" and not entry.get("declined") and not nobody


def _words(
    version: str,
    worst: Mapping[str, Any],
    picked: Mapping[str, Any],
    guess: Mapping[str, Any],
) -> str:
    """The suite in a sentence."""
    if "psnr" not in worst:
        return f"{version}: nothing could be scored."
    beside = guess.get("metrics", {}).get("psnr", {}).get("mean")
    without = "" if beside is None else f" (a guess without the update: {beside:.1f} dB)"
    chosen = f"{picked['psnr']['mean']:.1f} dB" if "psnr" in picked else "nothing"
    return (
        f"{version}: by its closest member each, {worst['psnr']['mean']:.1f} dB on average over "
        f"{worst['pictures']} pictures{without}, {100 * worst['recovered']:.0f} % recovered; an "
        f"attacker would have picked {chosen}."
    )


def _member(
    label: str,
    role: Role,
    by_label: Mapping[str, Mapping[str, Any]],
    excused: Mapping[str, frozenset[Try]],
) -> dict[str, Any]:
    entry = by_label.get(label, {})
    return {
        "attack": label,
        "stage": role.member.stage,
        "kind": role.member.kind,
        "check": role.sample,
        "victims": entry.get("victims", 0),
        "declined": bool(entry.get("declined")) and not entry.get("victims"),
        "spared": 0 if role.sample else len(excused.get(label, ())),
        "evaluations": role.member.evaluations,
    }


def _evaluations(scores: pd.DataFrame, played: Mapping[str, Role]) -> int:
    """Gradients of the client's model that the members computed in all, the check left out."""
    tries = scores.drop_duplicates(["attack", *VICTIM, "trial"])["attack"].value_counts()
    return sum(
        role.member.evaluations * int(tries.get(label, 0))
        for label, role in played.items()
        if not role.sample
    )


def _described(envelope: pd.DataFrame, prefix: str) -> dict[str, Any]:
    """The envelope, or what was picked, in numbers."""
    if envelope.empty:
        return {"pictures": 0}
    told: dict[str, Any] = {"pictures": count_pictures(envelope)}
    for name, metric in METRICS.items():
        column = f"{prefix}{name}"
        if column not in envelope or envelope[column].isna().all():
            continue
        values = envelope[column].astype(float)
        low, high = interval(envelope, column)
        told[name] = {
            "mean": clean(by_picture(envelope, column)["value"].mean()),
            "low": clean(low),
            "high": clean(high),
            "worst": clean(values.max() if metric.higher_leaks else values.min()),
        }
    for name in ("recovered", "identified"):
        values = envelope[f"{prefix}{name}"].dropna().astype(float)
        told[name] = clean(values.mean()) if len(values) else None
    if prefix:
        labels = envelope.assign(label_recovered=envelope[f"{prefix}label_recovered"])
        told["labels"] = (label_accuracy(labels) or {}).get("rate")
    return told


def _most_labels(entries: Iterable[Mapping[str, Any]]) -> float | None:
    """The largest share of labels that any member read."""
    shares = [e["label_accuracy"] for e in entries if e.get("label_accuracy") is not None]
    return max(shares, default=None)


def _by_client(envelope: pd.DataFrame) -> list[dict[str, Any]]:
    """The clients, the most exposed first."""
    if envelope.empty:
        return []
    rows = [
        {
            "client": int(each["client"].iloc[0]),
            "psnr": clean(each["psnr"].astype(float).mean()),
            "worst": clean(each["psnr"].astype(float).max()),
            "recovered": clean(each["recovered"].astype(float).mean()),
        }
        for _, each in envelope.groupby("client")
    ]
    return sorted(rows, key=lambda row: -(row["psnr"] or 0.0))


def excused_tries(
    spec: Spec, spared: Iterable[Job], refused: Collection[tuple[int, int]] = ()
) -> dict[str, frozenset[Try]]:
    """The tries of each member that were not needed: of victims that others recovered exactly, and
    of the check of the budget, all but its one. Who ``refused`` to upload was not there to try."""
    excused: dict[str, set[Try]] = {}
    for job in spared:
        excused.setdefault(job.label, set()).add((job.round, job.client, job.trial))
    chosen, played = victims(spec), roles(spec)
    there = [victim for victim in chosen if victim not in refused]
    every = {(*victim, trial) for victim in there for trial in range(spec.audit.trials)}
    for label, role in played.items():
        if role.sample:
            excused.setdefault(label, set()).update(every - {(*min(chosen), 0)})
    return {label: frozenset(tries) for label, tries in excused.items()}
