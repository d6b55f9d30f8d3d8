"""Scoring: reconstructions against the truth. The only reader of the vault.

Also the canary: the true batch, replayed through the simulator that attacks use, must give the
update that was observed. Where it does not, the attack was mis-specified, and a low score means
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedsim.campaign.jobs import Job, announced_model
from fedsim.core.attack import Reconstruction
from fedsim.core.device import resolve_device, threads
from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.learning import Update, local_update, recall
from fedsim.core.metrics import METRICS, Batch, Comparison, Metric, match_order
from fedsim.core.observation import Observation, observation_name, read_observation
from fedsim.core.run import Run
from fedsim.core.spec import Component
from fedsim.core.vault import Truth, Vault
from fedsim.defenses import create_defenses
from fedsim.scoring.identification import Gallery, Wanted

# Replays differ by rounding alone: about 1e-6 on a CPU, more after many local steps.
CANARY_TOLERANCE = 1e-4

_CANARIES, _FAILURE = TypeAdapter(dict[str, float]), TypeAdapter(dict[str, str])


def columns() -> list[str]:
    """Of the scores, in their order."""
    return [
        *("round", "client", "attack", "threat", "trial", "image"),
        *METRICS,
        *("label_true", "label_recovered", "identified", "seconds", "loss", "canary"),
    ]


@dataclass(frozen=True)
class Pictures:
    """A reconstruction beside the truth, in the truth's order, for whoever draws them."""

    job: Job
    truth: Tensor
    labels: Tensor
    guess: Tensor
    result: Reconstruction


def score_jobs(run: Run, jobs: list[Job], gallery: Gallery | None = None) -> pd.DataFrame:
    """One row for each true image of each finished job, in the order of the jobs.

    Victim by victim, because what is known of a true picture (its features) serves every attack.
    """
    canaries = check_canaries(run, sorted({(job.round, job.client) for job in jobs}))
    threat = run.spec.threat.model
    rows: dict[Job, list[dict[str, Any]]] = {}
    by_victim = sorted(jobs, key=lambda job: (job.round, job.client))
    for _, own in itertools.groupby(by_victim, key=lambda job: job.victim):
        yardstick: Yardstick | None = None
        for job in own:
            try:
                pictures = load_pictures(run, job)
            except FedsimError as error:  # damaged: costs this job, not the others
                where = {"round": job.round, "client": job.client}
                run.note("not_scored", f"{job.name} is not scored: {error}", **where)
                continue
            if pictures is not None:
                yardstick = yardstick or Yardstick.of(pictures.truth, gallery)
                rows[job] = _rows(pictures, yardstick, threat, canaries.get(job.victim))
    return pd.DataFrame([row for job in jobs for row in rows.get(job, [])], columns=columns())


def results_of(jobs: Iterable[Job]) -> Iterator[tuple[Job, Reconstruction]]:
    """The finished jobs with what they found; one whose result is damaged is not finished."""
    for job in jobs:
        if job.result.is_file():
            with suppress(RunError):
                yield job, Reconstruction.load(job.result)


def load_pictures(run: Run, job: Job) -> Pictures | None:
    """What a finished job found, beside the truth; None for one that did not finish."""
    if not job.result.is_file():
        return None
    result = Reconstruction.load(job.result)
    truth = Vault(run.vault).read(job.round, job.client)
    order = match_order(truth.images, result.images)
    blank = torch.full_like(truth.images[0], 0.5)  # an image the attack does not claim
    guess = torch.stack([result.images[row] if row >= 0 else blank for row in order])
    return Pictures(job, truth.images, truth.labels, guess, result)


@dataclass(frozen=True)
class Yardstick:
    """What one victim's pictures are compared by, computed once for all attacks on them."""

    truth: Batch
    metrics: tuple[Metric, ...]  # those that can be computed for these pictures
    gallery: Gallery | None
    wanted: Wanted | None  # in the gallery's eyes

    @classmethod
    def of(cls, truth: Tensor, gallery: Gallery | None) -> Yardstick:
        pictures = Batch(truth)
        return cls(
            pictures,
            tuple(m for m in METRICS.values() if m.missing(pictures.side) is None),
            gallery,
            gallery.wanted(truth) if gallery is not None else None,
        )

    def measure(self, guess: Tensor) -> dict[str, list[Any]]:
        """Every metric of every picture, a list a column."""
        compared = Comparison(self.truth, Batch(guess))
        measured: dict[str, list[Any]] = {
            name: [None] * len(guess) for name in (*METRICS, "identified")
        }
        measured |= {metric.name: metric.measure(compared).tolist() for metric in self.metrics}
        if self.gallery is not None and self.wanted is not None:
            measured["identified"] = self.gallery.identified(self.wanted, guess)
        return measured


def _rows(
    pictures: Pictures, yardstick: Yardstick, threat: str, canary: float | None
) -> list[dict[str, Any]]:
    job, result, labels = pictures.job, pictures.result, pictures.labels
    recovered = _align_labels(labels, result.labels)
    measured = yardstick.measure(pictures.guess)
    return [
        {
            "round": job.round,
            "client": job.client,
            "attack": job.label,
            "threat": threat,
            "trial": job.trial,
            "image": image,
            **{name: values[image] for name, values in measured.items()},
            "label_true": int(labels[image]),
            "label_recovered": recovered[image],
            "seconds": round(result.seconds, 4),
            "loss": result.loss,
            "canary": canary,
        }
        for image in range(len(labels))
    ]


def _align_labels(truth: Tensor, recovered: Tensor | None) -> list[int | None]:
    """Labels are recovered as a multiset: give each image its own where it is in there."""
    if recovered is None:
        return [None] * len(truth)
    left = [int(label) for label in recovered]
    found: list[int | None] = []
    for label in truth.tolist():
        found.append(label if label in left else None)
        if label in left:
            left.remove(label)
    return [left.pop(0) if label is None and left else label for label in found]


def check_canaries(run: Run, victims: list[tuple[int, int]]) -> dict[str, float]:
    """The relative error of each victim's replay; computed once and kept."""
    path = run.root / "canaries.json"
    known = _known_canaries(path)
    vault, device = Vault(run.vault), resolve_device(run.spec.engine.device)
    for round_, client in victims:
        name = observation_name(round_, client)
        if name in known:
            continue
        try:
            observation = read_observation(run.observations / f"{name}.json")
            known[name] = canary(
                observation,
                vault.read(round_, client),
                device,
                run.spec.cohort(round_),
                vault.read_state(round_, client),
            )
        except FedsimError as error:
            run.note("canary_failed", f"{name}: {error}", round=round_, client=client)
        except RuntimeError as error:  # torch: the announced model does not fit what was sent
            reason = str(error).splitlines()[0]
            run.note("canary_failed", f"{name}: {reason}", round=round_, client=client)
    write_json(path, known)
    return known


def _known_canaries(path: Path) -> dict[str, float]:
    """What was found before; nothing where the file is damaged, for it is found again."""
    try:
        return _CANARIES.validate_python(read_json(path))
    except (FileNotFoundError, DamagedError, ValidationError):
        return {}


def canary(
    observation: Observation,
    truth: Truth,
    device: torch.device,
    cohort: Sequence[int] = (),
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> float:
    """|replay - observed| / |observed| over the whole update.

    The replay uses what the protocol announced: its weights, model, normalisation, steps and
    declared defenses; of the client's secrets only the batch, the seed of those defenses and what
    they kept back before (``own``). It runs on the clients' kind of device, because devices round
    differently.
    """
    public = observation.public
    model = announced_model(public)
    model.load_state_dict(observation.weights)
    model.to(device)
    declared = recall(create_defenses([Component.model_validate(d) for d in public.defenses]), own)
    defenses = [d.at_round(observation.round, observation.client, cohort) for d in declared]
    with threads(1):
        replay = local_update(
            model,
            [(images.to(device), labels.to(device)) for images, labels in truth.replay()],
            public.protocol,
            defenses=defenses,
            rng=torch.Generator().manual_seed(truth.defense_seed),
        )
    return relative_error(replay, observation.update)


def relative_error(replay: Update, observed: Update) -> float:
    """Distance of two updates relative to the second; 1 where their parameters differ."""
    if replay.tensors.keys() != observed.tensors.keys():
        return 1.0
    pairs = [(replay.tensors[n].cpu().double(), t.double()) for n, t in observed.tensors.items()]
    distance = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return (distance / size) ** 0.5 if size > 0 else float(distance > 0)


def failures(jobs: list[Job]) -> list[dict[str, str]]:
    """The jobs that could not be done, with their reasons."""
    found = []
    for job in jobs:
        if job.failure.is_file() and not job.result.is_file():
            try:
                found.append(_FAILURE.validate_python(read_json(job.failure)))
            except (DamagedError, ValidationError):
                why = f"it failed, and '{job.failure}', which says why, is damaged"
                found.append({"job": job.name, "attack": job.label, "kind": "fault", "reason": why})
    return found
