"""Unscored: what attacks made of captured updates where nobody knows the truth, and where it is
known, which declaration does not agree with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fedsim.campaign.jobs import Job
from fedsim.core.device import resolve_device
from fedsim.core.errors import FedsimError
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path, truth_path
from fedsim.core.vault import Vault
from fedsim.scoring.canary import UNLEARNABLE, tolerance_of
from fedsim.scoring.diagnosis import Diagnosis, diagnose, tosses
from fedsim.scoring.scores import results_of

UNBOUND = "truth_unbound"  # the event that says why a client's witness does not tell the truth
MISDECLARED = "misdeclared"  # the event that names the field
NOTHING = "No single change of the declaration that was tried gives the update observed."
COINS = (
    "Its model tosses coins while it is trained (dropout), which nobody wrote down: no replay "
    "gives the update, and only what is recovered says anything."
)


def witnessed(run: Run, job: Job) -> bool:
    """Whether there is a truth for the victim of a job."""
    return truth_path(run.vault, job.round, job.client).is_file()


def unscored(run: Run, jobs: Iterable[Job]) -> dict[str, dict[str, Any]]:
    """By attack: how many pictures it made from how many updates, how many labels it read, and its
    own measure of fit in the median, where it has one; and why what was witnessed is no truth."""
    made: dict[str, list[Any]] = {}
    for job, result in results_of(jobs, run.spec.seed):
        made.setdefault(job.label, []).append((job, result))
    found = {}
    unbound = [event["message"] for event in run.events() if event["kind"] == UNBOUND]
    for label, results in made.items():
        losses = [result.loss for _, result in results if result.loss is not None]
        first = [result for job, result in results if not job.trial]
        found[label] = {
            "made": sum(len(result.images) for result in first),
            "victims": len({(job.round, job.client) for job, _ in results}),
            "labels_read": sum(0 if r.labels is None else len(r.labels) for r in first),
            "loss": float(np.median(losses)) if losses else None,
            "seconds": float(sum(result.seconds for _, result in results)),
            "unbound": unbound[-1] if unbound else None,
        }
    return found


def name_misdeclared(run: Run, scores: pd.DataFrame, verdicts: list[dict[str, Any]]) -> None:
    """Where a canary fails: replay the victim that costs least under other declarations, and say
    which one explains its update, in an event and in the verdict."""
    tolerance = tolerance_of(run.spec.train)
    apart = scores[scores["canary"].astype(float) > tolerance]
    if apart.empty:
        return
    sizes = apart.groupby(["round", "client"], as_index=False).size()
    least = sizes.sort_values("size", kind="stable").iloc[0]
    round_, client = int(least["round"]), int(least["client"])
    found, words = _diagnosed(run, round_, client)
    whole = scores[scores["canary"].astype(float) <= tolerance]
    others = len(whole.groupby(["round", "client"]))
    if others:
        words += (
            f" That is of client {client} in round {round_}; "
            f"{others} other update{'s' if others > 1 else ''} came about as declared."
        )
    where = {"round": round_, "client": client}
    run.note(MISDECLARED, words.removesuffix("."), **where)
    for entry in verdicts:
        if "canary" in entry:
            entry["canary"]["likely"] = found.field if found is not None else None
        if entry["verdict"] == "MIS-SPECIFIED":
            entry["likely"] = None if found is None else vars(found)
            entry["words"] = f"{entry['words']} {words}"


def _diagnosed(run: Run, round_: int, client: int) -> tuple[Diagnosis | None, str]:
    """What explains an update, and that in a sentence."""
    device = resolve_device(run.spec.engine.device)
    try:
        observation = read_observation(observation_path(run.observations, round_, client))
        truth = Vault(run.vault).read(round_, client, observation.checksum)
        found = diagnose(observation, truth, device)
        if found is not None:
            return found, found.words
        return None, COINS if tosses(observation, truth, device) else NOTHING
    except (FedsimError, *UNLEARNABLE):  # the canary says why it failed
        return None, NOTHING
