"""Pools of attack workers: jobs in, results on disk. In this process, or in Ray actors.

A job is done when its result file exists, and starts when that of the job it requires does. One
that comes after others starts when these are over, whatever became of them, and is needless where
one of them proved that it recovered the victim. A job that crashes or hangs is tried again; one
that cannot be done is reported with its reason; the others go on.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from fedsim.campaign.jobs import SPARED, AnyJob, Handout, Job, spared_by, work
from fedsim.campaign.pulse import HungError, Limits, Pulse
from fedsim.campaign.remote_files import (
    Post,
    Returned,
    Stamp,
    fetched,
    keep,
    reads,
    sees,
    stamps,
    work_on,
)
from fedsim.campaign.watchdog import broken_off, guarded
from fedsim.cluster.local import ATTACK_RESOURCE
from fedsim.cluster.session import own_version, refuse_version, still_up, worker_gpus
from fedsim.core.attack import Lesson, Progress, Reconstruction
from fedsim.core.device import threads
from fedsim.core.errors import AttackCrashError, AttackError, FedsimError, RunError
from fedsim.core.files import write_json
from fedsim.core.keyring import VARIABLE
from fedsim.core.knowledge import Secrets
from fedsim.core.plain import plain_text
from fedsim.core.seal import seal_process, sealed
from fedsim.core.spec import Spec


class Watcher(Protocol):
    """Told what becomes of the jobs."""

    def queued(self, job: AnyJob) -> None: ...
    def progressed(self, job: AnyJob, done: int, total: int, loss: float | None) -> None: ...
    def finished(self, job: AnyJob, failure: str | None) -> None: ...


Lookup = Callable[[AnyJob], Secrets]
Tell = Callable[..., None]  # kind, message, where: as a run notes its events


def untold(kind: str, message: str, **where: Any) -> None:
    """For callers that keep no events."""


class Pool(ABC):
    """Jobs in, results on disk; the subclasses say where the work is done.

    A job is held back until what it requires, or comes after, has settled.
    """

    def __init__(
        self,
        spec: Spec,
        handout: Handout,
        watcher: Watcher,
        secrets: Lookup,
        *,
        tell: Tell = untold,
    ):
        self.retries, self.limits = spec.engine.retries, Limits.of(spec.engine)
        self.handout, self.watcher, self.secrets, self.tell = handout, watcher, secrets, tell
        self.held: list[AnyJob] = []
        self.over: set[Path] = set()  # results of jobs that are done, have failed or are needless
        self.failed: dict[Path, tuple[str, str]] = {}  # result that never came: kind and reason
        self._lock = threading.Lock()

    def submit(self, job: AnyJob) -> None:
        """Queue a job, unless it is done."""
        if job.result.exists():
            return
        self.watcher.queued(job)
        with self._lock:
            failed = self.failed.get(job.requires) if job.requires else None
            waits = failed is None and self._waits(job)
            if waits:
                self.held.append(job)
        if failed is not None:
            self._fail(job, *failed)
        elif not waits:
            self._begin(job)

    def _waits(self, job: AnyJob) -> bool:
        """Whether something must come before this job that is not over yet."""
        if job.requires is not None and not job.requires.exists():
            return True
        first = job.after if isinstance(job, Job) else ()
        return any(result not in self.over and not result.exists() for result in first)

    def _begin(self, job: AnyJob) -> None:
        """Put a job that can start among those to be done, unless it has become needless."""
        recovered = spared_by(job) if isinstance(job, Job) else None
        if recovered is None:
            self._queue(job)
            return
        reason = f"{recovered} had recovered exactly what this update holds"
        about = {"job": job.name, "kind": SPARED, "reason": reason}
        write_json(job.failure, {**about, "attack": job.label})
        self.watcher.finished(job, None)
        self._go_on(job)

    @abstractmethod
    def _queue(self, job: AnyJob) -> None:
        """Put a job that can start among those to be done."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every job is done or has failed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the pool holds; jobs still queued stay undone."""

    def _done(self, job: AnyJob) -> None:
        """Start what waited for this job."""
        self.watcher.finished(job, None)
        self._go_on(job)

    def _go_on(self, settled: AnyJob) -> None:
        """Start what waited for nothing else."""
        with self._lock:
            self.over.add(settled.result)
            ready = [job for job in self.held if not self._waits(job)]
            self.held = [job for job in self.held if job not in ready]
        for job in ready:
            self._begin(job)

    def _fail(self, job: AnyJob, kind: str, reason: str) -> None:
        """Write down why a job cannot be done; what requires it cannot either."""
        about = {"job": job.name, "attack": job.label, "kind": kind, "reason": reason}
        write_json(job.failure, about)
        self.watcher.finished(job, reason)
        with self._lock:
            consequence = (kind, f"{job.name} failed: {reason}")
            self.failed[job.result] = consequence
            bound = [other for other in self.held if other.requires == job.result]
            self.held = [other for other in self.held if other not in bound]
        for other in bound:
            self._fail(other, *consequence)
        self._go_on(job)

    def _abandon(self) -> None:
        """Fail what waits for a job that nobody submitted."""
        while self.held:
            job = self.held.pop(0)
            first = job.requires or ", ".join(map(str, job.after if isinstance(job, Job) else ()))
            self._fail(job, "fault", f"what it waits for never came: {first}")

    def _settle(self, job: AnyJob, attempt: Callable[[], Reconstruction | Lesson]) -> None:
        """Try a job until it is done or has failed for good."""
        kind, reason = "crashed", ""
        for left in reversed(range(self.retries + 1)):
            try:
                attempt().save(job.result)
                job.failure.unlink(missing_ok=True)
            except FedsimError as error:  # the attack's last word: no retry would help
                kind, reason = _kind(error), _worded(error)
                break
            except _LostError:  # the worker's fate, not yet the job's
                raise
            except HungError as error:
                kind, reason = "hung", str(error)
                self._tell_hung(job, reason, again=left > 0)
            except Exception as error:
                kind, reason = "crashed", _crash(error)
            else:
                self._done(job)
                return
        self._fail(job, kind, reason)

    def _tell_hung(self, job: AnyJob, reason: str, *, again: bool) -> None:
        where = {"round": job.round} | ({"client": job.client} if isinstance(job, Job) else {})
        then = "and is tried again" if again else "and given up"
        self.tell("attack_hung", f"{job.name} was ended {then}: {reason}", **where)


def _kind(error: FedsimError) -> str:
    """An attack that declines is a finding; anything else is a fault of it or of the run."""
    if isinstance(error, AttackCrashError):
        return "crashed"
    return "declined" if isinstance(error, AttackError) else "fault"


def _worded(error: Exception) -> str:
    """What an error says. An attack may raise one of a class of its own, whose words are its
    author's code: it is asked under the seal."""
    with sealed():
        return plain_text(str(error))


def _crash(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, _CrashError):
        return str(cause)
    first = (_worded(cause).strip() or type(cause).__name__).splitlines()[0]
    return f"{type(cause).__name__}: {first}"


class InlinePool(Pool):
    """Every job in this process, one after the other, when the pool is drained; each in a thread
    of its own, which is given up when the job hangs."""

    def __init__(self, *args: Any, tell: Tell = untold):
        super().__init__(*args, tell=tell)
        self.jobs: list[AnyJob] = []

    def _queue(self, job: AnyJob) -> None:
        self.jobs.append(job)

    def drain(self) -> None:
        while self.jobs:
            job = self.jobs.pop(0)

            def report(done: int, total: int, loss: float | None = None, job: AnyJob = job) -> None:
                self.watcher.progressed(job, done, total, loss)

            def attempt(job: AnyJob = job, report: Progress = report) -> Reconstruction | Lesson:
                secrets = self.secrets(job)
                return guarded(
                    lambda progress: work(job, self.handout, secrets, progress), self.limits, report
                )

            self._settle(job, attempt)
        self._abandon()

    def close(self) -> None:
        """There is nothing to let go of."""


class AttackWorker:
    """What a Ray actor is: does one job at a time, and says meanwhile how far it is."""

    def __init__(self, cpu_threads: int):
        self.cpu_threads = cpu_threads
        self.state = Sign()

    def greet(self) -> Home:
        """Where this worker is, and which fedsim it has."""
        context = ray.get_runtime_context()
        return Home(context.get_node_id(), own_version())

    def sees(self, expected: dict[Path, Stamp]) -> bool:
        """Whether the driver's files are here as well."""
        return sees(expected)

    def work(
        self,
        job: AnyJob,
        handout: Handout,
        secrets: Secrets,
        sent: dict[str, ray.ObjectRef] | None = None,
    ) -> Returned:
        """Do a job on the driver's files or, where these are not here, on a parcel of them."""
        self.state = Sign()
        with threads(self.cpu_threads):
            try:
                if sent is not None:
                    return work_on(fetched(sent), job, handout, secrets, self._report)
                return Returned(work(job, handout, secrets, self._report), {})
            except FedsimError as error:
                # Ray wraps what an actor raises; ours must arrive as what they are.
                raise _VerdictError(type(error).__name__, _worded(error)) from None
            except Exception as error:  # no class of an attack's own leaves its process
                raise _CrashError(_crash(error)) from None
            except (
                BaseException
            ) as error:  # which would end the worker, and its other jobs' with it
                crash = broken_off(error)
                raise _VerdictError(type(crash).__name__, str(crash)) from None

    def status(self) -> Sign:
        return self.state

    def _report(self, done: int, total: int, loss: float | None = None) -> None:
        self.state = Sign(self.state.number + 1, done, total, loss)


@dataclass(frozen=True)
class Sign:
    """What a job under way last reported, and the how-manieth report it was."""

    number: int = 0
    done: int = 0
    total: int = 0
    loss: float | None = None


class SealedWorker(AttackWorker):
    """An attack worker in a process of its own, in which no vault opens and which is not told where
    keys are."""

    def __init__(self, cpu_threads: int):
        super().__init__(cpu_threads)
        seal_process()
        os.environ[VARIABLE] = os.devnull  # for the processes that it starts


@dataclass(frozen=True)
class Home:
    """Where an attack worker is."""

    node: str
    version: str


class _VerdictError(Exception):
    """A FedsimError on its way through Ray."""


class _CrashError(Exception):
    """What an attack that crashed said, on its way through Ray."""


class _LostError(Exception):
    """A worker died over a job, or its node did."""


class _HungWorkerError(_LostError):
    """A worker was killed because its job hung."""


class RayPool(Pool):
    """Ray actors in a resource of their own, each fed by a thread here.

    An actor for which no node has room yet waits, and takes no job meanwhile. What a worker leaves
    undone when it dies goes back to the queue, for whoever is free. A worker whose job hangs is
    killed, and started again.
    """

    patience = 300.0  # seconds without a single worker, after which the run gives up

    def __init__(
        self,
        spec: Spec,
        handout: Handout,
        watcher: Watcher,
        secrets: Lookup,
        *,
        tell: Tell = untold,
    ):
        super().__init__(spec, handout, watcher, secrets, tell=tell)
        workers = spec.engine.attack_workers
        cpus = spec.engine.cpus or os.cpu_count() or 1
        self.elsewhere = spec.engine.address is not None
        self.shared, self.post = ray.put(handout), Post()
        self.jobs: queue.Queue[AnyJob | None] = queue.Queue()
        self.lost: dict[Path, list[str]] = {}  # by result, the nodes on which a worker died over it
        self.hung: Counter[Path] = Counter()  # by result, how often its job hung
        self.broken: Exception | None = None
        self.closing = threading.Event()
        self.up: set[int] = set()  # the workers that answered when they were last asked
        actor_class = ray.remote(SealedWorker)
        self.actors: list[Any] = [
            actor_class.options(
                num_cpus=0,  # Flower sizes its pool from all CPUs; counting ours would starve one
                num_gpus=worker_gpus(spec.engine),
                resources={ATTACK_RESOURCE: 1},
                max_restarts=-1,  # on another node, if its own is gone
                max_concurrency=2,  # the job, and the question how far it is
            ).remote(max(1, cpus // workers))
            for _ in range(workers)
        ]
        self.feeders = [
            threading.Thread(target=self._feed, args=(actor,), daemon=True) for actor in self.actors
        ]
        for feeder in self.feeders:
            feeder.start()

    def _queue(self, job: AnyJob) -> None:
        self.jobs.put(job)

    def drain(self) -> None:
        while self.jobs.unfinished_tasks:
            if self.broken is not None:
                raise self.broken
            time.sleep(0.05)  # not join(): Ctrl-C must get through
        self._abandon()
        self._dismiss()
        for feeder in self.feeders:  # none may ask Ray anything once that is shut down
            feeder.join(timeout=10)

    def close(self) -> None:
        while not self.jobs.empty():
            self.jobs.get_nowait()
            self.jobs.task_done()
        self._dismiss()
        if ray.is_initialized():  # Flower's runtime shuts Ray down when its rounds are over
            for actor in self.actors:
                ray.kill(actor)

    def _dismiss(self) -> None:
        self.closing.set()
        for _ in self.feeders:
            self.jobs.put(None)

    def _feed(self, actor: Any) -> None:
        try:
            while self._home(actor) is not None:
                job = self.jobs.get()
                if job is None:
                    return
                if (home := self._home(actor, seconds=5)) is None:  # died while there was no job
                    self.jobs.put(job)
                else:
                    self._give(actor, home, job)
                self.jobs.task_done()
        except Exception as error:  # not even a failure could be written: a full disk
            self.broken = error

    def _give(self, actor: Any, home: Home, job: AnyJob) -> None:
        """Have a job done; where its worker dies, by another, as often as a job may be tried."""
        try:
            self._settle(job, lambda: self._remote(actor, home, job))
        except _HungWorkerError as error:
            self.hung[job.result] += 1
            again, reason = self.hung[job.result] <= self.retries, str(error)
            self._tell_hung(job, reason, again=again)
            if again:
                self.jobs.put(job)
            else:
                self._fail(job, "hung", reason)
        except _LostError:
            if self.closing.is_set():
                return
            nodes = self.lost.setdefault(job.result, [])
            nodes.append(home.node)
            # A node that is lost is no fault of the job, and does not count.
            counted = still_up(nodes) if self.elsewhere and len(nodes) > self.retries else nodes
            if len(counted) > self.retries:
                self._fail(job, "crashed", "the attack worker died")
            else:
                self.jobs.put(job)

    def _home(self, actor: Any, seconds: float | None = None) -> Home | None:
        """Wait until an actor is up; None where the pool closes, or after ``seconds``."""
        self.up.discard(id(actor))
        greeting, since = None, time.monotonic()
        while not self.closing.is_set():
            now = time.monotonic()
            if seconds is not None and now - since > seconds:
                return None
            if not self.up and now - since > self.patience:
                raise RunError(
                    f"no attack worker was up for {self.patience:.0f} s; is there a node with a "
                    f"free '{ATTACK_RESOURCE}' resource, and with fedsim installed?"
                )
            greeting = greeting or actor.greet.remote()
            if not ray.wait([greeting], timeout=0.2)[0]:
                continue
            try:
                home: Home = ray.get(greeting)
            except ray.exceptions.RayActorError:
                greeting = None
                time.sleep(0.5)
                continue
            self.up.add(id(actor))
            refuse_version(home.version, home.node[:8])
            return home
        return None

    def _remote(self, actor: Any, home: Home, job: AnyJob) -> Reconstruction | Lesson:
        try:
            sent = self._sent(actor, job) if self.elsewhere else None
            future = actor.work.remote(job, self.shared, self.secrets(job), sent)
            self._await(actor, future, job)
            returned: Returned = ray.get(future)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, _VerdictError):
                name, message = error.cause.args
                known = {kind.__name__: kind for kind in (AttackError, AttackCrashError)}
                raise known.get(name, FedsimError)(message) from None
            raise
        except ray.exceptions.RayActorError as error:
            raise _LostError(home.node) from error
        return keep(returned, job)

    def _await(self, actor: Any, future: Any, job: AnyJob) -> None:
        """Wait until a job is over, and say how far it is; where it hangs, kill its worker."""
        pulse, last = Pulse(self.limits), Sign()
        while not ray.wait([future], timeout=1)[0]:  # asking costs the driver, too
            try:
                sign: Sign = ray.get(actor.status.remote(), timeout=1)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                sign = last  # the job's own future tells what became of it
            if sign.number != last.number:
                pulse.beat(sign.total)
                last = sign
            if sign.total:
                self.watcher.progressed(job, sign.done, sign.total, sign.loss)
            if (why := pulse.overdue()) is not None:
                ray.kill(actor, no_restart=False)
                raise _HungWorkerError(why)

    def _sent(self, actor: Any, job: AnyJob) -> dict[str, ray.ObjectRef] | None:
        """What the job reads, in Ray's object store, where the worker does not see the disk."""
        files = reads(job, self.handout)
        return None if ray.get(actor.sees.remote(stamps(files))) else self.post.send(files)
