"""A stage for manoeuvres: one round of one client, or of a cohort whose sum alone is revealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import Batch, Update, local_update
from fedsim.core.manoeuvre import Brief, Isolated, Manoeuvre, Memory, Sighting, Tampered
from fedsim.core.metrics import psnr
from fedsim.core.models import build_architecture, build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec
from tests.staging import CPU, photos

VIT = ModelSpec(options={"patch_size": 8, "depth": 3, "embed_dim": 96, "num_heads": 3})
RESNET = ModelSpec(name="resnet10t")
SUMS = [{"name": "secure_aggregation", "bits": 24}]


def pictures(count: int, side: int = 32) -> Tensor:
    """Distinct photos; crops of the same scenes in turn, so that any few of them differ."""
    return photos(side, [(37 * k) % 251 for k in range(count)])[0]


@dataclass
class Stage:
    """A federation of one model, with the server's memory."""

    manoeuvre: Manoeuvre
    model: ModelSpec = VIT
    classes: int = 100
    train: TrainSpec = field(default_factory=lambda: TrainSpec(batch_size=8, mode="eval"))
    defenses: list[dict[str, Any]] = field(default_factory=list)
    surrogate: Tensor | None = None
    side: int = 32
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    memory: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = Spec(data=DataSpec(image_size=self.side), model=self.model, train=self.train)
        self.public = replace(Public.of(spec, self.classes), defenses=self.defenses)
        net = build_model(self.model, image_size=self.side, num_classes=self.classes, seed=0)
        self.weights: dict[str, Tensor] = dict(self.prepare(net).state_dict())

    def factory(self) -> nn.Module:
        net = build_architecture(self.model, image_size=self.side, num_classes=self.classes)
        return self.prepare(net)

    def brief(self, round_: int = 1, client: int = 0, cohort: Sequence[int] = (0,)) -> Brief:
        return Brief(
            round=round_,
            client=client,
            cohort=tuple(cohort),
            weights=self.weights,
            model=self.factory,
            public=self.public,
            surrogate=self.surrogate,
            memory=self.memory,
        )

    def received(self, sent: Tampered) -> dict[str, Tensor]:
        return {**self.weights, **sent.changed}

    def answer(self, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> Update:
        model = self.factory()
        model.load_state_dict(dict(weights))
        return local_update(model, batches, self.public.protocol)

    def play(
        self, images: Tensor, labels: Tensor, round_: int = 1, steps: int | None = None
    ) -> Sighting:
        """One client's round, learned from; ``steps``: so many batches, else one."""
        sent = self.manoeuvre.tamper(self.brief(round_))
        weights = self.received(sent)
        size = len(images) // (steps or 1)
        batches = list(zip(images.split(size), labels.split(size), strict=True))
        update = self.answer(weights, batches)
        seen = self.sighting(sent, weights, update, len(images), round_)
        self.manoeuvre.learn(seen, self.memory)
        return seen

    def play_sum(self, clients: Sequence[Batch], round_: int = 1) -> list[Sighting]:
        """A cohort's round, of which the server sees the mean, in fixed point."""
        cohort = range(len(clients))
        sent = [self.manoeuvre.tamper(self.brief(round_, c, cohort)) for c in cohort]
        updates = [
            self.answer(self.received(s), [batch]) for s, batch in zip(sent, clients, strict=True)
        ]
        mean = replace(updates[0], tensors=mean_of([u.tensors for u in updates]))
        total = sum(len(labels) for _, labels in clients)
        seen = [
            self.sighting(s, self.received(s), mean, total, round_, client)
            for client, s in enumerate(sent)
        ]
        for sighting in seen:
            self.manoeuvre.learn(sighting, self.memory)
        return seen

    def sighting(
        self,
        sent: Tampered,
        weights: dict[str, Tensor],
        update: Update,
        count: int,
        round_: int,
        client: int = 0,
    ) -> Sighting:
        return Sighting(
            round_, client, weights, update, sent.about, self.factory, self.public, count
        )

    def solved(self, seen: Sighting, isolated: Isolated) -> Tensor:
        """What `patch_solve` makes of what is isolated, (3, H, W)."""
        public = replace(self.public, batch_size=1, defenses=[])
        observation = Observation(
            seen.round, seen.client, dict(seen.weights), isolated.update, public
        )
        view = View(observation, THREATS["C"].grants, Announced(self.factory))
        attack = create_attack("patch_solve", snap=False)
        return attack.reconstruct(view, device=CPU, progress=no_progress).images[0]


def mean_of(updates: Sequence[Mapping[str, Tensor]], bits: int = 24) -> dict[str, Tensor]:
    """The mean of updates that were rounded to 2^-bits before they were summed."""
    return {
        name: (
            torch.stack([(u[name].double() * 2**bits).round() for u in updates]).sum(0)
            / 2**bits
            / len(updates)
        ).float()
        for name in updates[0]
    }


def decibels(image: Tensor, truth: Tensor) -> float:
    return float(psnr(truth[None], image[None]))


def closest(image: Tensor, truths: Tensor) -> float:
    return max(decibels(image, truth) for truth in truths)
