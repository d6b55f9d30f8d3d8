"""GIML (Jeon et al. 2021): a generator learned from gradients alone, across rounds and clients.

Every observation is a task. A meta-step draws some, finds for each the latents whose images match
its gradient (held near the middle), then takes a few steps of the generator's weights on all of
them together, from w to w', and moves w towards w': their Algorithm 2, a Reptile step. No picture
is ever seen. What it learned is then searched as in GIAS.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from fedsim.attacks.generators import generate, generator_metadata, load_generator, save_generator
from fedsim.attacks.gias import Gias, SpaceName, centre_of, draw_latents
from fedsim.attacks.matching import (
    PRESET,
    Budget,
    Count,
    Latents,
    Natural,
    Problem,
    Rate,
    Task,
    Weight,
    search,
    total_variation,
)
from fedsim.core.attack import Lesson, Progress, no_progress
from fedsim.core.errors import AttackError, ObservationError
from fedsim.core.files import write_atomically
from fedsim.core.knowledge import Traffic, View
from fedsim.core.notebook import Notebook, optimizer_tensors, restore_optimizer
from fedsim.core.run import observation_name
from fedsim.core.spec import GeneratorSpec

SHOWN = 8  # latents whose images are kept from step to step, to look at


@dataclass(frozen=True, kw_only=True)
class Giml(Gias):
    """Learning: ``meta_steps`` after each round, on all observations so far, of ``tasks``
    observations each; ``task_steps`` on the latents at ``task_lr``; ``shared_steps`` on the weights
    at ``shared_lr``; then w moves by ``beta`` of the way to w' (``outer`` reptile) or by an Adam
    step of ``outer_lr`` in that direction (``outer`` adam). ``lessons``: learn from the first so
    many rounds only.

    Attacking: as GIAS with the generator as it was ``after`` so many meta-steps; by default after
    all. A snapshot is kept every ``snapshot`` meta-steps (by default after each lesson), as a file
    that GIAS can use.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            **{"steps": 1500, "refine": 5000, "lr_z": 0.03, "tv": 1e-4, "keep": "last"},
            **{"task_steps": 1000, "task_lr": 0.03, "shared_steps": 500, "shared_lr": 1e-3},
        },
        "cpu": {
            **{"steps": 200, "refine": 500, "lr_z": 0.1, "tv": 0.01, "keep": "matching"},
            **{"task_steps": 30, "task_lr": 0.1, "shared_steps": 8, "shared_lr": 2e-3},
        },
    }

    space: SpaceName = "z"
    lr_z: Rate = PRESET
    tv: Weight = PRESET
    latent: Weight = 1e-3
    meta_steps: Count = 5
    tasks: Count = 4
    task_steps: Count = PRESET
    task_lr: Rate = PRESET
    shared_steps: Count = PRESET
    shared_lr: Rate = PRESET
    outer: Literal["reptile", "adam"] = "reptile"
    beta: Rate = 1.0
    outer_lr: Rate = 1e-2
    lessons: Count | None = None
    after: Natural | None = None
    snapshot: Count | None = None

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"traffic"}

    @property
    def _trained(self) -> bool:
        return False  # it learns its own

    # -- what it learns, and when -------------------------------------------------------------

    @property
    def learner(self) -> str:
        """Attacks that learn alike share one memory, whatever they search afterwards."""
        attacking = {"steps", "refine", "space", "seeds", "group", "after", "schedule"}
        attacking |= {"lr", "lr_w", "lr_z"}
        names = [f.name for f in fields(self) if f.name not in attacking]
        learning = {name: repr(getattr(self, name)) for name in names}
        digest = hashlib.sha256(json.dumps(learning, sort_keys=True).encode()).hexdigest()[:8]
        return f"giml-{digest}"

    def lessons_before(self, rounds: int) -> int:
        """How many lessons must be over before it attacks, where ``rounds`` are observed."""
        available = min(rounds, self.lessons or rounds)
        if self.after is None:
            return available
        wanted = math.ceil(self.after / self.meta_steps)
        if self.after % (self.snapshot or self.meta_steps) and self.after % self.meta_steps:
            raise AttackError(
                f"giml keeps no generator after {self.after} meta-steps; give a multiple of "
                f"{self.snapshot or self.meta_steps}, or a smaller snapshot."
            )
        if wanted > available:
            raise AttackError(
                f"giml takes {self.meta_steps * available} meta-steps in {available} rounds; "
                f"after: {self.after} would need more."
            )
        return wanted

    def learn(
        self,
        traffic: Traffic,
        lesson: int,
        memory: Path,
        *,
        seed: int,
        device: torch.device,
        progress: Progress,
    ) -> Lesson:
        """The meta-steps of one lesson, from where the memory left off."""
        if self.lessons is not None and lesson > self.lessons:
            return Lesson(notes=["learning is over"])
        if not len(traffic):
            return Lesson(notes=["nothing was observed yet"])
        state = MetaLearner(self, traffic, memory, seed, device)
        return state.run(lesson * self.meta_steps, progress)

    # -- attacking with what it learned -------------------------------------------------------

    def generator(self, problem: Problem) -> nn.Module:
        view = problem.view
        if view.memory is None:
            raise AttackError("giml attacks only after it has learned, in an audit of its own.")
        snapshots = sorted(view.memory.glob("step-*.safetensors"))
        steps = [int(path.stem.split("-")[1]) for path in snapshots]
        if not steps or steps[-1] == 0:
            raise AttackError(
                "giml has learned nothing: no update was observed in the rounds of its lessons."
            )
        last = self.after if self.after is not None else steps[-1]
        if last not in steps:
            raise AttackError(
                f"giml kept no generator after {last} meta-steps; it kept {_listed(steps)}."
            )
        file = snapshots[steps.index(last)]
        count = generator_metadata(file).get("observations", 0)
        problem.notes.append(
            f"generator learned from gradients alone: {last} meta-steps on {count} observations"
        )
        chosen = GeneratorSpec(checkpoint=str(file))
        return load_generator(chosen, image_size=problem.side).to(problem.device)


class MetaLearner:
    """The generator between meta-steps; what must survive a crash is on its page."""

    def __init__(
        self, attack: Giml, traffic: Traffic, memory: Path, seed: int, device: torch.device
    ):
        self.attack, self.traffic, self.memory = attack, traffic, memory
        self.seed, self.device = seed, device
        self.page = Notebook(memory / "state.safetensors")
        self.ledger: list[str] = []
        self.skipped: list[str] = []
        self.side = self._side()
        self.net = attack.fresh(self.side, seed=seed % 2**31).to(device)
        self.weights = list(self.net.parameters())
        self.outer = torch.optim.Adam(self.weights, lr=attack.outer_lr)
        self.step, self.losses = 0, list[list[float]]()
        self.samples = torch.empty(0, SHOWN, 3, self.side, self.side, dtype=torch.uint8)
        self.way, self.spread = attack.engine, 1.0
        self._resume()

    def run(self, until: int, progress: Progress) -> Lesson:
        began = self.step
        if self.step == 0 and not len(self.samples):
            self._write()
        while self.step < until:
            loss = self.meta_step()
            progress(self.step - until + self.attack.meta_steps, self.attack.meta_steps, loss)
        return Lesson(
            steps=self.step,
            losses=self.losses[began:],
            ledger=self.ledger,
            notes=[*dict.fromkeys(self.skipped), self.words],
        )

    @property
    def words(self) -> str:
        return f"{self.step} meta-steps on {len(self.traffic)} observations, engine {self.way}"

    # -- one meta-step ------------------------------------------------------------------------

    def meta_step(self) -> float:
        """Latents of every task, shared steps of the weights, one move; the mean matching loss."""
        coin = torch.Generator().manual_seed((self.seed + 7919 * (self.step + 1)) % 2**63)
        tasks = self._tasks(coin)
        matched = [self._latents(task, coin) for task in tasks]
        self.spread = self._spread([latents for latents, _ in matched])
        before = [weight.detach().clone() for weight in self.weights]
        after, loss = self._shared(tasks, [latents for latents, _ in matched])
        self._move(before, after)
        self.step += 1
        latent_loss = sum(value for _, value in matched) / len(matched)
        self.losses.append([self.step, latent_loss, loss])
        self._write()
        return loss

    def _tasks(self, coin: torch.Generator) -> list[Task]:
        """Observations at random; one that cannot be used is passed over and noted."""
        count, tasks = min(self.attack.tasks, len(self.traffic)), list[Task]()
        for row in torch.randperm(len(self.traffic), generator=coin).tolist():
            address = self.traffic.addresses[row]
            try:
                tasks.append(self._task(self.traffic.open(*address)))
            except (AttackError, ObservationError) as error:
                self.skipped.append(f"{observation_name(*address)} was passed over: {error}")
            if len(tasks) == count:
                break
        if not tasks:
            raise AttackError(f"no observation can be learned from: {self.skipped[-1]}")
        return tasks

    def _side(self) -> int:
        """The size of the pictures, from the first observation that opens."""
        errors = []
        for address in self.traffic.addresses:
            try:
                return self.traffic.open(*address).image_size
            except ObservationError as error:
                errors.append(str(error))
        raise AttackError(f"no observation can be opened: {errors[0]}")

    def _task(self, view: View) -> Task:
        # Whether first-order derivatives can be trusted is asked once, of the first task.
        task = replace(self.attack, seeds=1, engine=self.way).task(view, self.device)
        if self.way == "auto":
            self.way = getattr(task.matcher, "way", "double")
        self.ledger += [field for field in view.ledger if field not in self.ledger]
        return task

    def _latents(self, task: Task, coin: torch.Generator) -> tuple[Tensor, float]:
        """The latents that match best with the weights fixed, (1, B, ...)."""
        attack, problem = self.attack, task.problem
        space = Latents(
            self.net,
            draw_latents(self.net, 1, problem.count, coin),
            task.labels,
            problem.normalised,
            centre_of(self.net, self.device),
            attack.latent,
        )
        budget = Budget(steps=attack.task_steps, lr=attack.task_lr, schedule="step")
        best = search(
            task.matcher,
            space,
            task.labels,
            budget,
            terms=attack.terms(problem),
            progress=no_progress,
        )
        return best.variables[0], best.loss

    def _shared(self, tasks: list[Task], latents: list[Tensor]) -> tuple[list[Tensor], float]:
        """w' after the shared steps on all tasks, and their last mean matching loss."""
        attack, loss = self.attack, math.nan
        self.net.requires_grad_(True)
        optimizer = torch.optim.Adam(self.weights, lr=attack.shared_lr)
        for _ in range(attack.shared_steps):
            optimizer.zero_grad(set_to_none=True)
            values = []
            for task, z in zip(tasks, latents, strict=True):
                made = generate(self.net, z.flatten(0, 1), task.labels.flatten())
                images = task.problem.normalised(made)[None]
                match = task.matcher(images.detach(), task.labels)
                tv = attack.tv * total_variation(images).sum()
                share = 1 / len(tasks)
                torch.autograd.backward([images, tv * share], [match.images * share, None])
                values.append(match.value.mean())
            optimizer.step()
            loss = float(torch.stack(values).mean())
        self.net.requires_grad_(False)
        return [weight.detach().clone() for weight in self.weights], loss

    def _move(self, before: list[Tensor], after: list[Tensor]) -> None:
        """From w towards w'."""
        with torch.no_grad():
            for weight, old, new in zip(self.weights, before, after, strict=True):
                if self.attack.outer == "reptile":
                    weight.copy_(torch.lerp(old, new, self.attack.beta))
                else:
                    weight.copy_(old)
                    weight.grad = old - new
        if self.attack.outer == "adam":
            self.outer.step()
        for weight in self.weights:
            weight.grad = None

    def _spread(self, latents: list[Tensor]) -> float:
        """How far from the middle the tasks' latents lie, where 1 is as far as random ones."""
        centre = centre_of(self.net, self.device)
        usual = draw_latents(self.net, 1, 256, torch.Generator().manual_seed(0))[0]
        matched = torch.cat([z.flatten(0, 1) for z in latents])
        ratio = (matched - centre).square().mean() / (usual - centre).square().mean()
        return float(ratio.sqrt())

    # -- what is kept -------------------------------------------------------------------------

    def _write(self) -> None:
        """State, snapshot and samples after a meta-step; the state last, to vouch for both."""
        self.memory.mkdir(parents=True, exist_ok=True)
        attack = self.attack
        if self.step % (attack.snapshot or attack.meta_steps) == 0 or (
            self.step % attack.meta_steps == 0
        ):
            self.samples = torch.cat([self.samples, self._sample()[None]])
            draw_samples(self.samples, self.memory / "samples.png")
            save_generator(
                self.memory / f"step-{self.step:05d}.safetensors",
                attack.architecture,
                {"image_size": self.side, **attack.options},
                self.net,
                learned_from="gradients alone",
                meta_steps=self.step,
                observations=len(self.traffic) if self.step else 0,
            )
        tensors = {f"w.{i}": weight.detach() for i, weight in enumerate(self.weights)}
        tensors |= optimizer_tensors(self.outer) | {"samples": self.samples}
        self.page.save(tensors, self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "losses": self.losses,
            "engine": self.way,
            "spread": self.spread,
            "learner": self.attack.learner,
        }

    def _resume(self) -> None:
        page = self.page.load()
        if page is None or page[1].get("learner") != self.attack.learner:
            return
        tensors, about = page
        with torch.no_grad():
            for index, weight in enumerate(self.weights):
                weight.copy_(tensors[f"w.{index}"])
        restore_optimizer(self.outer, tensors)
        self.step, self.losses = int(about["step"]), about["losses"]
        self.way, self.samples = about["engine"], tensors["samples"]
        self.spread = float(about["spread"])

    def _sample(self) -> Tensor:
        """What the generator makes of a few directions that stay the same, as far from the middle
        as the tasks' latents were; as bytes."""
        centre = centre_of(self.net, self.device)
        latents = draw_latents(self.net, 1, SHOWN, torch.Generator().manual_seed(1))[0]
        latents = centre + self.spread * (latents - centre)
        count = int(getattr(self.net, "num_classes", 0) or 1)
        labels = torch.arange(SHOWN, device=self.device) % count
        with torch.no_grad():
            images = generate(self.net, latents, labels)
        return (images * 255).round().to(torch.uint8).cpu()


def draw_samples(samples: Tensor, path: Path, rows: int = 8) -> None:
    """A grid of samples (steps, n, 3, H, W): a row for some of the steps, the first and the last
    among them."""
    picked = torch.linspace(0, len(samples) - 1, min(rows, len(samples))).round().long()
    grid = samples[picked].permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    picture = Image.fromarray(grid.numpy())
    png = io.BytesIO()
    picture.save(png, "PNG")
    write_atomically(path, png.getvalue())


def _listed(steps: list[int]) -> str:
    shown = steps if len(steps) <= 8 else [*steps[:4], steps[-1]]
    return ", ".join(map(str, shown))


def read_memory(memory: Path) -> Mapping[str, Any] | None:
    """What a learner's page says: steps, losses, samples; None where there is none."""
    page = Notebook(memory / "state.safetensors").load()
    return None if page is None else {**page[1], "samples": page[0]["samples"]}
