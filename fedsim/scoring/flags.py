"""Flags: when not to believe what a suite of attacks came to.

    canary                the protocol announced does not reproduce the updates
    closed_form           a closed form beats every search by 20 dB: the searches say little here
    no_better_than_guess  what the searches found explains the updates no better than the guess of
                          somebody who never saw them
    budget                four times the steps move a sample by more than 1 dB
    proof                 a victim was taken for recovered, and is not: its other members never ran
    declined              a member did not play for want of something that the letter allows for

Each has a sentence. All but ``closed_form``, ``declined`` and ``canary`` compare what the attacker
itself can tell, or the truth after the fact, and none changes a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedsim.campaign.suites import Cast, Role
from fedsim.scoring.statistics import KEYS

if TYPE_CHECKING:
    from fedsim.scoring.envelope import Weighed
    from fedsim.scoring.verdict import Try

CLOSED_DB, MOVED_DB, PROVEN_DB = 20.0, 1.0, 40.0


def flags_of(
    cast: Cast,
    played: Mapping[str, Role],
    scores: pd.DataFrame,
    envelope: pd.DataFrame,
    entries: Sequence[Mapping[str, Any]],
    tries: Sequence[Weighed],
    excused: Mapping[str, frozenset[Try]],
    baseline: str | None,
) -> list[dict[str, str]]:
    """The flags of a suite, each with its sentence."""
    found = {
        "canary": _canary(entries),
        "closed_form": _closed_form(scores, played),
        "no_better_than_guess": _no_better(tries, played, baseline),
        "budget": _budget(cast, played, scores),
        "proof": _proof(envelope, played, excused, tries),
        "declined": _declined(cast),
    }
    return [{"flag": name, "words": words} for name, words in found.items() if words]


def _canary(entries: Sequence[Mapping[str, Any]]) -> str | None:
    if all(entry.get("canary", {}).get("ok", True) for entry in entries):
        return None
    return (
        "The canary failed: the clients' true batches, replayed as announced, do not give the "
        "updates observed, so a low number says nothing about the defense."
    )


def _of_kind(played: Mapping[str, Role], kind: str) -> list[str]:
    return [n for n, role in played.items() if role.member.kind == kind and not role.sample]


def _closed_form(scores: pd.DataFrame, played: Mapping[str, Role]) -> str | None:
    """By the pictures that both kinds were tried on."""
    closest = {
        kind: scores[scores["attack"].isin(_of_kind(played, kind))].groupby(KEYS)["psnr"].max()
        for kind in ("closed", "search")
    }
    apart = (closest["closed"] - closest["search"]).dropna()
    if apart.empty or float(apart.mean()) < CLOSED_DB:
        return None
    return (
        f"A closed form is {apart.mean():.0f} dB closer than every search: what the searches reach "
        f"says little about what is in these updates."
    )


def _no_better(
    tries: Iterable[Weighed], played: Mapping[str, Role], baseline: str | None
) -> str | None:
    """By how far what was found is from explaining the update, which no truth is needed for."""
    searches = set(_of_kind(played, "search"))
    guess: dict[tuple[int, int], float] = {}
    best: dict[tuple[int, int], float] = {}
    for one in tries:
        victim, distance = (one.job.round, one.job.client), one.fit.distance
        if one.job.label == baseline:
            guess[victim] = distance
        elif one.job.label in searches:
            best[victim] = min(distance, best.get(victim, np.inf))
    both = guess.keys() & best.keys()
    if not both or any(best[victim] < guess[victim] for victim in both):
        return None
    return (
        "No search explains an update better than the guess of somebody who never saw it: they "
        "found nothing, which is no sign that there is nothing."
    )


def _budget(cast: Cast, played: Mapping[str, Role], scores: pd.DataFrame) -> str | None:
    """The checked member beside itself with four times its steps, on the sample."""
    longer = [name for name, role in played.items() if role.sample]
    plain = [name for name, role in played.items() if role.member.title == cast.suite.checks]
    if not longer or not plain:
        return None
    tried = scores[scores["attack"] == longer[0]]
    before = scores[(scores["attack"] == plain[0]) & (scores["trial"] == 0)]
    pairs = tried.merge(before, on=KEYS, suffixes=("", "_before"))
    moved = (pairs["psnr"] - pairs["psnr_before"]).astype(float)
    if pairs.empty or abs(float(moved.mean())) <= MOVED_DB:
        return None
    return (
        f"Four times the steps move '{plain[0]}' by {moved.mean():+.1f} dB on a sample: at this "
        f"budget the numbers of the searches are not where they end."
    )


def _proof(
    envelope: pd.DataFrame,
    played: Mapping[str, Role],
    excused: Mapping[str, frozenset[Try]],
    tries: Iterable[Weighed],
) -> str | None:
    """Victims that were spared further members, and whose pictures are not all there; of a batch
    of which a manoeuvre left some, these."""
    spared = {
        (round_, client)
        for label, tried in excused.items()
        if label in played and not played[label].sample
        for round_, client, _ in tried
    }
    if not spared or envelope.empty:
        return None
    told: dict[tuple[int, int], int] = {}  # how many pictures the proof is of
    for one in tries:
        if one.fit.is_exact:
            victim = (one.job.round, one.job.client)
            told[victim] = min(one.pictures, told.get(victim, one.pictures))
    wrong = sorted(
        victim
        for victim, each in envelope.groupby(["round", "client"])["psnr"]
        if victim in spared and each.nlargest(told.get(victim, len(each))).min() < PROVEN_DB
    )
    if not wrong:
        return None
    return (
        f"Client {wrong[0][1]} in round {wrong[0][0]} was taken for recovered, because a "
        f"reconstruction explains all of its update, and is not ({len(wrong)} in all): run the "
        f"suite with exhaustive: true."
    )


def _declined(cast: Cast) -> str | None:
    if not cast.missing:
        return None
    each = "; ".join(f"{name}: {why}" for name, why in cast.missing.items())
    return f"Not all members of this letter could play. {each}."
