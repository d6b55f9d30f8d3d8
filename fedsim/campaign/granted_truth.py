"""Granted truth: what a threat model grants of the truth, read by the testbed, never by an attack.

Whoever asks for it, grants or not, asks about observations of the run at hand and of no other.

True labels, a list in which the batch's pictures hide among others, and its BatchNorm statistics
are knowledge like any other: handed over in the View where the threat section grants them, and
named in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.campaign.candidates import Listed, listed
from fedsim.campaign.jobs import AnyJob, Job, LessonJob, observed_by
from fedsim.campaign.seen import read_from
from fedsim.core.anatomy import batchnorm_names, feature_statistics
from fedsim.core.attack import needs_of
from fedsim.core.candidates import CANDIDATES
from fedsim.core.knowledge import Secrets, Statistics, granted_by
from fedsim.core.observation import (
    Observation,
    read_observation,
    recorded_checksum,
    refuse_foreign,
)
from fedsim.core.run import Run, address_of
from fedsim.core.spec import Component, Spec
from fedsim.core.vault import Truth, Vault
from fedsim.defenses.applied import announced


def secrets_of(spec: Spec, run: Run) -> Callable[[AnyJob], Secrets]:
    """A lookup, job by job, of what the threat model grants of the truth; a lesson is given without
    any. It raises for a job that would read an observation of another run."""
    return partial(_secrets, spec, run.classes, Vault(run.vault))


def refuse_other_runs(job: AnyJob, spec: Spec, classes: int | None) -> None:
    """Raise where a job would read an observation that is not of the run of ``spec``."""
    for path in observed_by(job, granted_by(spec.threat)):
        refuse_foreign(path, spec, classes)


def _secrets(spec: Spec, classes: int | None, vault: Vault, job: AnyJob) -> Secrets:
    refuse_other_runs(job, spec, classes)
    granted = granted_by(spec.threat)
    asked = isinstance(job, Job) and asks_for_candidates(job.attack, granted)
    if isinstance(job, LessonJob) or not (asked or granted & {"oracle_labels", "batch_statistics"}):
        return Secrets()
    by_client = _truths(vault, job, granted)
    truths = list(by_client.values())
    alone = truths[0] if len(truths) == 1 else None
    return Secrets(
        labels=torch.cat([t.labels for t in truths]) if "oracle_labels" in granted else None,
        statistics=_statistics(job, alone) if alone and "batch_statistics" in granted else None,
        candidates=listed(spec, job.round, by_client[job.client], truths).candidates
        if asked
        else None,
    )


def asks_for_candidates(component: Component, granted: frozenset[str]) -> bool:
    """Whether an attack is handed a list of candidates: it names them among its needs."""
    if CANDIDATES not in granted:
        return False
    return CANDIDATES in needs_of(create_attack(component.name, **component.params))


def listed_for(run: Run, job: Job) -> Listed:
    """The list that a job was handed, with what scoring knows of it."""
    truths = _truths(Vault(run.vault), job, granted_by(run.spec.threat))
    return listed(run.spec, job.round, truths[job.client], list(truths.values()))


def _truths(vault: Vault, job: Job, granted: frozenset[str]) -> dict[int, Truth]:
    """The truths behind what a job reads, by client: of a whole cohort, where only its sum is
    read."""
    files = read_from(job.observation, granted)
    by_address = ((address_of(file), recorded_checksum(file)) for file in files)
    return {client: vault.read(r, client, update) for (r, client), update in by_address}


def _statistics(job: Job, truth: Truth) -> Statistics | None:
    """The statistics behind an update of one step; several steps have no one batch."""
    if len(truth.batches) > 1:
        return None
    return batch_statistics(read_observation(job.observation), truth)


def batch_statistics(observation: Observation, truth: Truth) -> Statistics | None:
    """Mean and (unbiased) variance of the client's batch before every BatchNorm layer."""
    public = observation.public
    model = announced(public)
    names = batchnorm_names(model)
    if not names:
        return None
    model.load_state_dict(observation.weights)
    model.train(public.protocol.mode == "train")
    statistics: Statistics = {}

    def listen(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics[name] = feature_statistics(inputs[0])

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(partial(listen, name))
    images, _ = truth.replay()[0]
    with torch.no_grad():
        model(public.protocol.normalise(images))
    return statistics
