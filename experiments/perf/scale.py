"""How far one driver carries: what a client, an update and an attack job cost it.

    python experiments/perf/scale.py clients    # rounds a minute and the driver's memory
    python experiments/perf/scale.py workers    # attack jobs a minute

Every line is measured in a process of its own, on a Ray of its own. The driver's own seconds are
its processor time, which does not depend on how many cores the clients had to share. What the
numbers mean for more machines is worked out in docs/scale.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch

from fedsim.audit.stages import federate
from fedsim.campaign.jobs import Handout, Job
from fedsim.campaign.plan import prepare, victims
from fedsim.campaign.pools import RayPool
from fedsim.campaign.progress import Silent
from fedsim.cluster.session import ray_session
from fedsim.core.attack import Progress, Reconstruction
from fedsim.core.knowledge import Secrets, View
from fedsim.core.spec import Component, Spec, load_spec

MODELS = {
    "tiny": [
        "data.image_size=32",
        "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
    ],
    "vit-ti": ["data.image_size=224", "model.name=vit_tiny_patch16_224"],
}
CLIENTS = {"tiny": (4, 16, 64, 256), "vit-ti": (4, 16, 64)}
ATTACKS = {
    "waits": Component(name="experiments.perf.scale:Waits"),
    "patch_solve": Component(name="patch_solve"),
    "inverting_gradients": Component.model_validate({"name": "inverting_gradients", "steps": 100}),
}
WORKERS = {"waits": (1, 4, 16), "patch_solve": (1, 2), "inverting_gradients": (1, 2)}
JOBS = {"waits": 64, "patch_solve": 64, "inverting_gradients": 8}
ROUNDS = 3  # the first is left out: processes start and import in it
SECONDS = 1.0  # how long a job waits
MEGABYTE = 2**20
PROJECTED = {"ViT-Ti": 21.1, "ViT-S": 82.7, "ViT-B": 327.3}  # megabytes of an update, 10 classes


@dataclass(frozen=True)
class Waits:
    """Does nothing for a while: to the driver, a job on a GPU that is not here."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        time.sleep(SECONDS)
        side = view.image_size
        return Reconstruction(torch.full((view.batch_size, 3, side, side), 0.5))


@dataclass(frozen=True)
class Rounds:
    """What rounds of so many clients took."""

    clients: int
    update: float  # megabytes of one
    seconds: float  # of a round
    driver: float  # seconds of a round in which the driver was at work
    memory: float  # megabytes at the driver's peak, above its start
    shared: float  # megabytes of Ray's object store that it had mapped at its peak


@dataclass(frozen=True)
class Jobs:
    """What attack jobs took on so many workers."""

    workers: int
    jobs: int
    seconds: float  # of all of them, the workers being up
    driver: float  # seconds in which the driver was at work


class Memory(threading.Thread):
    """The highest this process stood, its own memory and the object store's apart."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_own, self.own, self.shared = self._now()[0], 0.0, 0.0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            own, shared = self._now()
            self.own = max(self.own, own - self.start_own)
            self.shared = max(self.shared, shared)

    @staticmethod
    def _now() -> tuple[float, float]:
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = {
            line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")
        }
        return kilobytes["RssAnon"] / 2**10, kilobytes["RssShmem"] / 2**10


class Laps(Silent):
    """Notes the driver's processor time and each round's row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.driver: list[float] = []

    def round_done(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.driver.append(time.process_time())


def spec_of(model: str, *overrides: str) -> Spec:
    plain = ["train.evaluate=false", "engine={kind: ray, device: cpu}"]
    return load_spec({}, [*MODELS[model], *plain, *overrides])


def rounds_of(model: str, clients: int) -> Rounds:
    spec = spec_of(model, f"data.clients={clients}", f"train.rounds={ROUNDS}")
    prepare(spec)
    memory, laps = Memory(), Laps()
    memory.start()
    with tempfile.TemporaryDirectory() as folder:
        federate(spec, Path(folder) / "run", watch=laps)
    memory.over.set()
    later = laps.rows[1:]
    return Rounds(
        clients,
        update=laps.rows[0]["bytes"] / clients / MEGABYTE,
        seconds=sum(row["seconds"] for row in later) / len(later),
        driver=(laps.driver[-1] - laps.driver[0]) / len(later),
        memory=memory.own,
        shared=memory.shared,
    )


def jobs_of(attack: str, workers: int) -> Jobs:
    spec = spec_of("tiny", f"engine.attack_workers={workers}", "data.clients=4")
    with tempfile.TemporaryDirectory() as folder:
        run = federate(spec, Path(folder) / "run")
        targets = victims(spec)
        jobs = [
            Job(run.observations, run.reconstructions, *targets[n % len(targets)],
                ATTACKS[attack], attack, n)
            for n in range(JOBS[attack])
        ]  # fmt: skip
        with ray_session(spec.engine):
            handout = Handout(spec.threat, spec.seed, "cpu")
            pool = RayPool(spec, handout, Silent(), lambda job: Secrets())
            try:
                first = replace(jobs[0], results=Path(folder))  # on each: its imports are not timed
                ray.get([actor.work.remote(first, handout, Secrets()) for actor in pool.actors])
                began, worked = time.perf_counter(), time.process_time()
                for job in jobs:
                    pool.submit(job)
                pool.drain()
                seconds, driver = time.perf_counter() - began, time.process_time() - worked
            finally:
                pool.close()
        lost = [job.name for job in jobs if not job.result.is_file()]
        assert not lost, lost
    return Jobs(workers, len(jobs), seconds, driver)


def measured(*words: str) -> dict[str, Any]:
    """One line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.perf.scale", "one", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def clients() -> None:
    measures: dict[str, list[Rounds]] = {}
    for model, counts in CLIENTS.items():
        lines = measures[model] = []
        for count in counts:
            line = Rounds(**measured("clients", model, str(count)))
            lines.append(line)
            print(
                f"{model}, {line.clients} clients, {line.update:.2f} MB an update: "
                f"{60 / line.seconds:.1f} rounds a minute, {line.seconds / line.clients:.3f} s a "
                f"client and round, of them {line.driver / line.clients:.3f} s the driver's; "
                f"driver's peak {line.memory:.0f} MB above its start, "
                f"{line.shared:.0f} MB of the object store mapped",
                flush=True,
            )
        slope = np.polyfit([line.clients for line in lines], [line.memory for line in lines], 1)[0]
        print(
            f"{model}: the driver's peak grows by {slope:.2f} MB a client, "
            f"{slope / lines[0].update:.2f} updates",
            flush=True,
        )
    small, large = measures["tiny"], measures["vit-ti"]
    print(carried_on(small[-2], small[-1], large[-1]))


def carried_on(small: Rounds, many: Rounds, large: Rounds) -> str:
    """The driver's seconds per client as a sum: a constant, the bytes, and the other clients.

    From as many clients of a small model and of a large one, and from more of the small one.
    """
    a, b, c = (line.driver / line.clients for line in (small, large, many))
    byte = (b - a) / (large.update - small.update)
    other = max(0.0, (c - a) / (many.clients - small.clients))
    constant = a - byte * small.update - other * small.clients
    words = [f"the driver: {constant:.3f} s a client, {byte:.4f} s a MB, {other:.6f} s a neighbour"]
    for name, update in PROJECTED.items():
        for n in (64, 1000):
            seconds = n * (constant + byte * update + other * n)
            size = n * update / 1024
            words.append(f"{n} clients of {name}: {seconds:.0f} s a round, {size:.1f} GB")
    return "\n".join(words)


def workers() -> None:
    for attack, counts in WORKERS.items():
        for count in counts:
            line = Jobs(**measured("workers", attack, str(count)))
            print(
                f"{attack}, {line.workers} workers: {60 * line.jobs / line.seconds:.0f} jobs a "
                f"minute, {1000 * line.driver / line.jobs:.0f} ms of the driver a job",
                flush=True,
            )


def main(words: list[str]) -> None:
    match words:
        case ["clients"]:
            clients()
        case ["workers"]:
            workers()
        case ["one", "clients", model, count]:
            print(json.dumps(asdict(rounds_of(model, int(count)))))
        case ["one", "workers", attack, count]:
            print(json.dumps(asdict(jobs_of(attack, int(count)))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
