"""Jobs: one attack on one observation in one trial, or one lesson of an attack that learns.

What a job is, where its result goes, what it is handed, and how it is done here and now.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedsim.attacks import code_of, create_attack
from fedsim.attacks.fit import fit_of
from fedsim.attacks.generators import load_generator
from fedsim.campaign.seen import isolated_in, read_from, read_seen
from fedsim.core.attack import (
    Fit,
    Learner,
    Lesson,
    Progress,
    Reconstruction,
    no_progress,
    reads_traffic,
    traits_of,
)
from fedsim.core.candidates import refuse_other_claims, shown_to
from fedsim.core.device import resolve_device
from fedsim.core.errors import AttackError, NotGranted, RunError
from fedsim.core.knowledge import (
    Announced,
    Assets,
    Desk,
    Secrets,
    Traffic,
    View,
    granted_by,
)
from fedsim.core.learning import Protocol
from fedsim.core.ledger import Ledger
from fedsim.core.manoeuvre import Isolated
from fedsim.core.notebook import Notebook
from fedsim.core.observation import Observation, is_finite, recorded_checksum
from fedsim.core.plain import plain_lesson, plain_progress, plain_result
from fedsim.core.prior_networks import load_prior
from fedsim.core.run import (
    address_of,
    failure_path,
    lesson_path,
    list_observations,
    notebook_path,
    observation_name,
    observation_path,
    result_path,
)
from fedsim.core.seal import sealed
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Component, ThreatSpec
from fedsim.defenses.applied import announced, built, client_of, countered


@dataclass(frozen=True)
class Job:
    """One attack on one observation, in one trial."""

    observations: Path  # the folder of the observations
    results: Path  # the folder of the reconstructions
    round: int
    client: int
    attack: Component
    label: str  # the attack's name in tables; unique in a run
    trial: int
    requires: Path | None = None  # the result of another job that comes first
    memory: Path | None = None  # what the attack has learned
    after: tuple[Path, ...] = ()  # results that come first, and may make this one needless
    judged: bool = False  # whether its result is weighed by what the attacker itself can tell

    @property
    def victim(self) -> str:
        return observation_name(self.round, self.client)

    @property
    def name(self) -> str:
        return f"{self.label} on {self.victim}, trial {self.trial}"

    @property
    def observation(self) -> Path:
        return self.observations / f"{self.victim}.json"

    @property
    def result(self) -> Path:
        return result_path(self.results, self.label, self.round, self.client, self.trial)

    @property
    def notebook(self) -> Path:
        return notebook_path(self.result)

    @property
    def failure(self) -> Path:
        return failure_path(self.result)

    def seed(self, seed: int) -> int:
        return seed_from(f"{seed} {self.label} {self.round} {self.client} {self.trial}")

    def digest(self, seed: int) -> str:
        """A hash of what its result depends on beside the observation; the result names it."""
        attack = [self.label, self.attack.name, self.attack.params, self.trial, self.seed(seed)]
        return hashlib.sha256(json.dumps(attack, sort_keys=True).encode()).hexdigest()[:32]


SPARED = "spared"  # what a job is called that need not be done


def spared_by(job: Job) -> str | None:
    """Which of the attacks before this job proved, by what the attacker itself can tell, that it
    has all of the victim's pictures; None where none did."""
    for path in job.after:
        if path.is_file():
            try:
                result = Reconstruction.load(path)
            except RunError:
                continue
            if result.fit is not None and result.fit.is_exact:
                return path.parents[1].name
    return None


@dataclass(frozen=True)
class LessonJob:
    """One lesson of a learner: on the observations of all rounds up to ``round``, or for that round
    alone."""

    observations: Path
    memory: Path
    attack: Component
    label: str
    lesson: int  # from 1
    round: int
    requires: Path | None = None

    @property
    def name(self) -> str:
        return f"lesson {self.lesson} of {self.label}"

    @property
    def result(self) -> Path:
        return lesson_path(self.memory, self.lesson)

    @property
    def failure(self) -> Path:
        return failure_path(self.result)

    def seed(self, seed: int) -> int:
        return seed_from(f"{seed} {self.memory.name}")


AnyJob = Job | LessonJob


@dataclass(frozen=True)
class Handout:
    """What the testbed hands an attack beside the observation, as the threat model grants it."""

    threat: ThreatSpec
    seed: int
    device: str
    surrogate: Tensor | None = None

    @property
    def granted(self) -> frozenset[str]:
        return granted_by(self.threat)

    def blank(self) -> Handout:
        """Without the run's seed, from which simulated clients draw their secrets: a View may hold
        this one."""
        surrogate = self.surrogate if "surrogate" in self.granted else None
        return replace(self, seed=0, surrogate=surrogate)


def observed_by(job: AnyJob, granted: frozenset[str]) -> list[Path]:
    """The observations that a job may open: its own, or all up to its round."""
    attack = create_attack(job.attack.name, **job.attack.params)
    if isinstance(job, Job) and not reads_traffic(attack, granted):
        return read_from(job.observation, granted)
    if isinstance(job, LessonJob) and traits_of(attack).rehearses:
        return [
            path for path in list_observations(job.observations) if address_of(path)[0] == job.round
        ]
    return [
        path for path in list_observations(job.observations) if address_of(path)[0] <= job.round
    ]


def traffic_of(
    observations: Path,
    handout: Handout,
    until: int,
    seed: int,
    ledger: Ledger | None = None,
    *,
    since: int = 1,
) -> Traffic:
    """The observations of all rounds from ``since`` up to ``until``, without those that are not
    finite."""
    handout = handout.blank()
    rounds = range(since, until + 1)
    paths = [path for path in list_observations(observations) if address_of(path)[0] in rounds]
    addresses = tuple(address_of(path) for path in paths if is_finite(path))

    read = ledger if ledger is not None else Ledger()

    def open_(round_: int, client: int) -> View:
        path = observation_path(observations, round_, client)
        desk = Desk(seed ^ (round_ << 20) ^ client, read)
        return _view(read_seen(path, handout.granted), handout, desk)

    return Traffic(addresses, open_)


def _view(
    observation: Observation,
    handout: Handout,
    desk: Desk,
    secrets: Secrets | None = None,
    traffic: Callable[[], Traffic] | None = None,
    isolated: Isolated | None = None,
) -> View:
    """What the threat model grants on one observation."""
    prior, generator = handout.threat.prior, handout.threat.generator
    side = observation.public.image_size
    return View(
        observation,
        shown_to(handout.granted, secrets.candidates if secrets else None),
        _announced(observation, handout.granted, isolated),
        assets=Assets(
            handout.surrogate,
            partial(load_prior, prior) if prior is not None else None,
            partial(load_generator, generator, image_size=side) if generator else None,
        ),
        secrets=secrets,
        traffic=traffic,
        desk=desk,
        isolated=isolated,
    )


def _announced(
    observation: Observation, granted: frozenset[str], isolated: Isolated | None
) -> Announced:
    """What the federation agreed on, without what is not granted: whoever knows the architecture
    but not the defenses gets the model they leave, and not how it was made."""
    update = isolated.update if isolated is not None else observation.update
    public, defenses = observation.public, observation.public.defenses
    if defenses and "defenses" not in granted:
        model = announced(public) if "architecture" in granted else torch.nn.Identity()
        return Announced(partial(copy.deepcopy, model))
    # The part of the protocol that the model is built by, and no more: a closure holds it.
    part = Protocol(trainable=public.protocol.trainable, lora=public.protocol.lora)
    parts = public.architecture, public.num_classes, public.image_size
    return Announced(
        partial(built, *parts, defenses, part),
        partial(countered, update, defenses),
        client_of(defenses, observation.round, observation.client, observation.cohort),
    )


def teach(job: LessonJob, handout: Handout, progress: Progress = no_progress) -> Lesson:
    """Give one lesson here and now."""
    attack = create_attack(job.attack.name, **job.attack.params)
    traits = traits_of(attack)
    if traits.learns_from not in handout.granted:
        raise NotGranted(
            f"{job.name} needs the {traits.learns_from}, which the threat model does not grant."
        )
    seed, ledger = job.seed(handout.seed), Ledger()
    since = job.round if traits.rehearses else 1
    traffic = traffic_of(job.observations, handout, job.round, seed, ledger, since=since)
    began = time.perf_counter()
    with sealed():
        assert isinstance(attack, Learner)
        lesson = plain_lesson(
            attack.learn(
                traffic,
                job.lesson,
                job.memory,
                seed=seed,
                device=resolve_device(handout.device),
                progress=plain_progress(progress),
            )
        )
    lesson.seconds = time.perf_counter() - began
    source = traits.learns_from
    lesson.ledger = [source, *[name for name in ledger if name != source]]
    return lesson


def perform(
    job: Job, handout: Handout, secrets: Secrets, progress: Progress = no_progress
) -> Reconstruction:
    """Run one job here and now. What comes back is the testbed's own, and none of its author's code
    runs after the seal is off."""
    observation = read_seen(job.observation, handout.granted)
    ledger = Ledger()
    attack = create_attack(job.attack.name, **job.attack.params)
    source = traits_of(attack).learns_from
    notebook = Notebook(job.notebook, ledger)
    desk = Desk(job.seed(handout.seed), ledger, notebook, job.memory, source)
    folder, blank = job.observations, handout.blank()
    traffic = partial(traffic_of, folder, blank, job.round, desk.seed, ledger)
    began = time.perf_counter()
    device = resolve_device(handout.device)
    # The baseline guesses at the whole batch, whatever a manoeuvre leaves of it.
    found = None if job.attack.is_baseline else isolated_in(observation, handout.granted)
    if found is not None and not found.pictures:
        result = _nothing_left(observation, found)
        for name in ("tampering", "update"):  # what the server found that out by
            ledger.note(name)
    else:
        view = _view(observation, handout, desk, secrets, traffic, found)
        with sealed():
            told = plain_progress(progress)
            result = plain_result(attack.reconstruct(view, device=device, progress=told))
        refuse_other_claims(result, secrets.candidates)
        result.notes += [found.words] if found is not None and found.words else []
        _check(result, observation)
        if job.judged:
            result.fit = _weighed(result, observation, handout, secrets, device)
    result.seconds = time.perf_counter() - began
    result.ledger, result.observation = list(ledger), observation.checksum
    result.made_by, result.code = job.digest(handout.seed), code_of(job.attack.name)
    return result


def _weighed(
    result: Reconstruction,
    observation: Observation,
    handout: Handout,
    secrets: Secrets,
    device: torch.device,
) -> Fit | None:
    """What a result explains of the update, by a View of its own: the attack did not read that, and
    its ledger says what its pictures rest on."""
    found = isolated_in(observation, handout.granted)
    if found is not None and not found.pictures:
        return None
    view = _view(observation, handout, Desk(), secrets, isolated=found)
    with sealed():
        return fit_of(view, result, device)


def _nothing_left(observation: Observation, found: Isolated) -> Reconstruction:
    """The result on an update that no picture is left in: no picture is claimed."""
    side = observation.public.image_size
    return Reconstruction(torch.zeros(0, 3, side, side), notes=[found.words])


def _check(result: Reconstruction, observation: Observation) -> None:
    side = observation.public.image_size
    shape = tuple(result.images.shape)
    if len(shape) != 4 or shape[1:] != (3, side, side):
        raise AttackError(
            f"the attack returned images of shape {shape}, not (B, 3, {side}, {side})"
        )
    if not result.claims:
        raise AttackError("the attack returned no picture.")
    if not bool(torch.isfinite(result.images).all()):
        raise AttackError("the attack returned pixels that are not finite.")
    refuse_surplus(result, observation.pictures)
    result.images = result.images.detach().cpu().float().clamp(0, 1)


def refuse_surplus(result: Reconstruction, most: int) -> None:
    """Raise where an attack returned more guesses than pictures stand behind the update: the truth
    would choose among them for it."""
    counts = {"pictures": len(result.images), "labels": 0}
    if result.labels is not None:
        counts["labels"] = result.labels.numel()
    if result.features is not None:
        counts["features"] = len(result.features)
    for what, count in counts.items():
        if count > most:
            raise AttackError(
                f"the attack returned {count} {what}, and at most {most} stand behind the update."
            )


def refuse_other_result(result: Reconstruction, job: Job, seed: int) -> None:
    """Raise where a result is not that of the job it lies under, in a run of this ``seed``: made
    from another update, by another attack, or in another trial.

    A result that names neither was written by a version that named nothing, and is taken as it is.
    """
    if not result.observation and not result.made_by:
        return
    observed = recorded_checksum(job.observation)
    if not result.observation or (observed and result.observation != observed):
        why = "it was made from another update than the one observed"
    elif not result.made_by:
        why = "it does not say which attack made it"
    elif result.made_by != job.digest(seed):
        why = "it was made by another attack, with other parameters or in another trial"
    else:
        return
    raise RunError(f"{why}; go on with `fedsim audit --resume` and it is made again.")


def work(
    job: AnyJob, handout: Handout, secrets: Secrets, progress: Progress = no_progress
) -> Reconstruction | Lesson:
    """Do a job of either kind."""
    if isinstance(job, LessonJob):
        return teach(job, handout, progress)
    return perform(job, handout, secrets, progress)
