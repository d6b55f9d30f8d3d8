"""Attack workers: jobs in, reconstructions on disk. In this process, or Ray actors of their own.

A job is one attack on one observation in one trial. It is done when its result file exists. A
job that crashes is tried again; one that cannot be done is reported with its reason, and the
others go on.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from torch import Tensor, nn

from attacks import create_attack
from defenses import create_defenses
from fedsim.core.attack import Progress, Reconstruction, no_progress
from fedsim.core.device import resolve_device, threads
from fedsim.core.errors import AttackError, FedsimError
from fedsim.core.knowledge import Statistics, View, granted_by, sealed
from fedsim.core.models import build_architecture
from fedsim.core.notebook import Notebook
from fedsim.core.observation import Observation, Public, observation_name, read_observation
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import Component, ModelSpec, Spec, ThreatSpec
from fedsim.core.store import write_json
from fedsim.simulation import ATTACK_RESOURCE


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
        return self.results / self.label / f"{self.victim}-trial-{self.trial}.safetensors"

    @property
    def notebook(self) -> Path:
        """Where a long attack keeps its state, to go on from after a crash."""
        return self.result.with_suffix(".unfinished.safetensors")

    @property
    def failure(self) -> Path:
        return self.result.with_suffix(".failed.json")

    def seed(self, seed: int) -> int:
        text = f"{seed} {self.label} {self.round} {self.client} {self.trial}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


@dataclass(frozen=True)
class Handout:
    """What the testbed hands an attack beside the observation: as the threat model grants it."""

    threat: ThreatSpec
    seed: int
    device: str
    surrogate: Tensor | None = None

    @property
    def granted(self) -> frozenset[str]:
        return granted_by(self.threat)


@dataclass(frozen=True)
class Secrets:
    """What of the truth the threat model grants on one observation."""

    labels: Tensor | None = None
    statistics: Statistics | None = None


def announced_model(public: Public) -> nn.Module:
    """The architecture the federation agreed on, without weights, declared defenses included."""
    model = build_architecture(
        ModelSpec.model_validate(public.architecture),
        image_size=public.image_size,
        num_classes=public.num_classes,
    )
    for defense in create_defenses([Component.model_validate(d) for d in public.defenses]):
        model = defense.prepare_model(model)
    return model


def perform(
    job: Job, handout: Handout, secrets: Secrets, progress: Progress = no_progress
) -> Reconstruction:
    """Run one job here and now."""
    observation = read_observation(job.observation)
    prior = handout.threat.prior
    view = View(
        observation,
        handout.granted,
        architecture=lambda: announced_model(observation.public),
        surrogate=handout.surrogate,
        oracle_labels=secrets.labels,
        batch_statistics=secrets.statistics,
        prior=partial(load_prior, prior) if prior is not None else None,
        notebook=Notebook(job.notebook),
        seed=job.seed(handout.seed),
    )
    attack = create_attack(job.attack.name, **job.attack.params)
    began = time.perf_counter()
    with sealed():
        result = attack.reconstruct(view, device=resolve_device(handout.device), progress=progress)
    result.seconds = time.perf_counter() - began
    result.ledger = view.ledger
    _check(result, observation)
    return result


def _check(result: Reconstruction, observation: Observation) -> None:
    side = observation.public.image_size
    shape = tuple(result.images.shape)
    if len(shape) != 4 or shape[1:] != (3, side, side):
        raise AttackError(
            f"the attack returned images of shape {shape}, not (B, 3, {side}, {side})"
        )
    if not bool(torch.isfinite(result.images).all()):
        raise AttackError("the attack returned pixels that are not finite.")
    result.images = result.images.detach().cpu().float().clamp(0, 1)


class Watcher(Protocol):
    """Told what becomes of the jobs."""

    def queued(self, job: Job) -> None: ...
    def progressed(self, job: Job, done: int, total: int, loss: float | None) -> None: ...
    def finished(self, job: Job, failure: str | None) -> None: ...


Lookup = Callable[[Job], Secrets]


class Pool:
    """Jobs in, results on disk; the subclasses say where the work is done."""

    def __init__(self, spec: Spec, handout: Handout, watcher: Watcher, secrets: Lookup):
        self.retries, self.handout, self.watcher, self.secrets = (
            spec.engine.retries,
            handout,
            watcher,
            secrets,
        )

    def submit(self, job: Job) -> None:
        """Queue a job, unless it is done."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until every queued job is done or has failed."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the pool holds; jobs still queued stay undone."""

    def _settle(self, job: Job, attempt: Callable[[], Reconstruction]) -> None:
        """Try a job until it is done or has failed for good."""
        kind, reason = "crashed", ""
        for _ in range(self.retries + 1):
            try:
                attempt().save(job.result)
                job.failure.unlink(missing_ok=True)
                self.watcher.finished(job, None)
                return
            except FedsimError as error:  # the attack's last word: no retry would help
                kind, reason = _kind(error), str(error)
                break
            except Exception as error:
                reason = _crash(error)
        about = {"job": job.name, "attack": job.label, "kind": kind, "reason": reason}
        write_json(job.failure, about)
        self.watcher.finished(job, reason)


def _kind(error: FedsimError) -> str:
    """An attack that declines has told something; anything else is a fault of the run."""
    return "declined" if isinstance(error, AttackError) else "fault"


def _crash(error: Exception) -> str:
    if isinstance(error, ray.exceptions.RayActorError):
        return "the attack worker died"
    cause = getattr(error, "cause", None) or error
    first = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return f"{type(cause).__name__}: {first}"


class InlinePool(Pool):
    """Every job in this process, one after the other, when the pool is drained."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        if not job.result.exists():
            self.jobs.append(job)
            self.watcher.queued(job)

    def drain(self) -> None:
        while self.jobs:
            job = self.jobs.pop(0)

            def report(done: int, total: int, loss: float | None = None, job: Job = job) -> None:
                self.watcher.progressed(job, done, total, loss)

            def attempt(job: Job = job, report: Progress = report) -> Reconstruction:
                return perform(job, self.handout, self.secrets(job), report)

            self._settle(job, attempt)


class AttackWorker:
    """A Ray actor: performs one job at a time, and says meanwhile how far it is."""

    def __init__(self, cpu_threads: int):
        self.cpu_threads = cpu_threads
        self.state: tuple[int, int, float | None] = (0, 0, None)

    def perform(self, job: Job, handout: Handout, secrets: Secrets) -> Reconstruction:
        self.state = (0, 0, None)
        with threads(self.cpu_threads):
            try:
                return perform(job, handout, secrets, self._report)
            except FedsimError as error:
                # Ray wraps what an actor raises; ours must arrive as what they are.
                raise _VerdictError(type(error).__name__, str(error)) from None

    def status(self) -> tuple[int, int, float | None]:
        return self.state

    def _report(self, done: int, total: int, loss: float | None = None) -> None:
        self.state = (done, total, loss)


class _VerdictError(Exception):
    """A FedsimError on its way through Ray."""


class RayPool(Pool):
    """Ray actors in a resource of their own, each fed by a thread here."""

    def __init__(self, spec: Spec, handout: Handout, watcher: Watcher, secrets: Lookup):
        super().__init__(spec, handout, watcher, secrets)
        workers = spec.engine.attack_workers
        gpus = ray.cluster_resources().get("GPU", 0)
        cpus = spec.engine.cpus or os.cpu_count() or 1
        self.shared = ray.put(handout)
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.broken: Exception | None = None
        actor_class = ray.remote(AttackWorker)
        self.actors: list[Any] = [
            actor_class.options(
                num_cpus=0,  # Flower sizes its pool from all CPUs; counting ours would starve one
                num_gpus=min(1, gpus / workers) if gpus else 0,
                resources={ATTACK_RESOURCE: 1},
                max_restarts=-1,
                max_concurrency=2,  # the job, and the question how far it is
            ).remote(max(1, cpus // workers))
            for _ in range(workers)
        ]
        self.feeders = [
            threading.Thread(target=self._feed, args=(actor,), daemon=True) for actor in self.actors
        ]
        for feeder in self.feeders:
            feeder.start()

    def submit(self, job: Job) -> None:
        if not job.result.exists():
            self.watcher.queued(job)
            self.jobs.put(job)

    def drain(self) -> None:
        while self.jobs.unfinished_tasks:
            if self.broken is not None:
                raise self.broken
            time.sleep(0.05)  # not join(): Ctrl-C must get through

    def close(self) -> None:
        while not self.jobs.empty():
            self.jobs.get_nowait()
            self.jobs.task_done()
        for _ in self.feeders:
            self.jobs.put(None)
        if ray.is_initialized():  # Flower's runtime shuts Ray down when its rounds are over
            for actor in self.actors:
                ray.kill(actor)

    def _feed(self, actor: Any) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self._settle(job, lambda job=job: self._remote(actor, job))  # type: ignore[misc]
            except Exception as error:  # not even a failure could be written: a full disk
                self.broken = error
                return
            self.jobs.task_done()

    @staticmethod
    def _await_restart(actor: Any, seconds: float = 120) -> None:
        """A killed actor is started again by Ray, and refuses calls until it is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                ray.get(actor.status.remote(), timeout=seconds)
                return
            except ray.exceptions.RayActorError:
                time.sleep(0.5)

    def _remote(self, actor: Any, job: Job) -> Reconstruction:
        self._await_restart(actor)
        future = actor.perform.remote(job, self.shared, self.secrets(job))
        while not ray.wait([future], timeout=0.3)[0]:
            try:
                done, total, loss = ray.get(actor.status.remote(), timeout=1)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                continue  # the job's own future tells what became of it
            if total:
                self.watcher.progressed(job, done, total, loss)
        try:
            result: Reconstruction = ray.get(future)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, _VerdictError):
                name, message = error.cause.args
                raise (AttackError if name == AttackError.__name__ else FedsimError)(
                    message
                ) from None
            raise
        return result
