"""A server with one manoeuvre and clients that answer it, in one process, and its models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from experiments.training.cifar10 import CHECKPOINTS, NETWORKS
from fedsim.attacks import create_attack
from fedsim.clients.data import load_images
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Secrets, View
from fedsim.core.learning import Batch, Protocol, Update, local_update
from fedsim.core.manoeuvre import Brief, Isolated, Manoeuvre, Memory, Sighting, Tampered
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model, load_checkpoint
from fedsim.core.observation import Observation, Public
from fedsim.core.sent import Chosen
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec, Upload

CPU = torch.device("cpu")
FIXED_POINT = 24  # bits behind the point, as `secure_aggregation` has them
SUMS = [{"name": "secure_aggregation", "bits": FIXED_POINT}]


@dataclass
class Server:
    """A server with one manoeuvre, and clients that answer it."""

    manoeuvre: Manoeuvre
    model: ModelSpec
    side: int
    classes: int
    train: TrainSpec
    weights: dict[str, Tensor]
    surrogate: Tensor | None = None
    sums: bool = False
    memory: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = Spec(data=DataSpec(image_size=self.side), model=self.model, train=self.train)
        self.public = replace(Public.of(spec, self.classes), defenses=SUMS if self.sums else [])

    def factory(self) -> nn.Module:
        return build_model(self.model, image_size=self.side, num_classes=self.classes, seed=0)

    def sent(self, round_: int, client: int, cohort: Sequence[int]) -> Tampered:
        brief = Brief(
            round=round_,
            client=client,
            cohort=tuple(cohort),
            weights=self.weights,
            model=self.factory,
            public=self.public,
            surrogate=self.surrogate,
            memory=self.memory,
        )
        return self.manoeuvre.tamper(brief)

    def round(
        self, clients: Sequence[Sequence[Batch]], round_: int = 1, *, bits: int = FIXED_POINT
    ) -> list[Sighting]:
        """What the server sees of one round, learned from; under sums the mean, for everyone."""
        cohort = range(len(clients))
        sent = [self.sent(round_, client, cohort) for client in cohort]
        received = [{**self.weights, **tampered.changed} for tampered in sent]
        updates = [self.answer(w, b) for w, b in zip(received, clients, strict=True)]
        counts = [sum(len(labels) for _, labels in batches) for batches in clients]
        if self.sums:
            updates = [fixed_point_mean(updates, bits)] * len(clients)
            counts = [sum(counts)] * len(clients)
        seen = [
            Sighting(
                round_, c, received[c], updates[c], sent[c].about, self.factory, self.public, n
            )
            for c, n in zip(cohort, counts, strict=True)
        ]
        for sighting in seen:
            self.manoeuvre.learn(sighting, self.memory)
        return seen

    def answer(self, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> Update:
        """What an honest client that received these weights uploads."""
        model = self.factory()
        model.load_state_dict(dict(weights))
        return local_update(model, batches, self.public.protocol)

    def honest(self, batch: Batch) -> tuple[Sighting, Isolated]:
        """The same client with honest weights: all of its batch, its labels known."""
        update = self.answer(self.weights, [batch])
        count = len(batch[1])
        seen = Sighting(1, 0, self.weights, update, {}, self.factory, self.public, count)
        return seen, Isolated(update, count, batch[1])

    def isolated(self, seen: Sighting) -> Isolated:
        """What is left of an update by the manoeuvre's own account."""
        isolated = self.manoeuvre.isolate(seen)
        assert isolated is not None
        return isolated

    def solved(
        self, seen: Sighting, isolated: Isolated, attack: str = "patch_solve", **params: Any
    ) -> Tensor:
        """The attack's pictures, (B, 3, H, W), of what is isolated."""
        public = replace(self.public, batch_size=max(1, isolated.pictures), defenses=[])
        observation = Observation(
            seen.round, seen.client, dict(seen.weights), isolated.update, public
        )
        grants = THREATS["C"].grants | {"oracle_labels"}
        secrets = Secrets(labels=isolated.labels)
        view = View(observation, grants, Announced(self.factory), secrets=secrets)
        found = create_attack(attack, **params)
        return found.reconstruct(view, device=CPU, progress=no_progress).images

    def read(self, seen: Sighting, attack: str) -> Tensor:
        """The pictures of an attack that decodes what its own manoeuvre made of an update."""
        chosen = Chosen(manoeuvre={"name": attack}, about=dict(seen.about))
        weights = dict(seen.weights)
        observation = Observation(1, 0, weights, seen.update, self.public, chosen=chosen)
        view = View(observation, THREATS["F"].grants, Announced(self.factory))
        return create_attack(attack).reconstruct(view, device=CPU, progress=no_progress).images


def fixed_point_mean(updates: Sequence[Update], bits: int = FIXED_POINT) -> Update:
    """As a secure sum gives it: every upload is rounded to 2^-bits."""
    tensors = {}
    for name in updates[0].tensors:
        rounded = [(update.tensors[name].double() * 2**bits).round() for update in updates]
        tensors[name] = (torch.stack(rounded).sum(0) / 2**bits / len(updates)).float()
    return replace(updates[0], tensors=tensors)


# -- pictures and models ------------------------------------------------------------------------


def load_pictures(path: str | None, side: int) -> Tensor:
    """All pictures there are, (N, 3, H, W) in [0, 1]."""
    data = DataSpec(image_size=side)
    if path:
        data = DataSpec(name="imagefolder", path=path, image_size=side)
    splits = [load_images(data, "train"), load_images(data, "test")]
    return torch.stack([images.image(row) for images in splits for row in range(len(images))])


def fresh_weights(
    model: ModelSpec, images: Tensor, *, steps: int = 0, mode: str = "eval"
) -> dict[str, Tensor]:
    """Of a model as it is made, or after so many SGD steps on batches of 32."""
    net = build_model(model, image_size=images.shape[-1], num_classes=len(images), seed=0)
    net.train(mode == "train")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        rows = torch.randperm(len(images), generator=coin(step))[:32]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net((images[rows] - 0.5) / 0.5), rows)
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def weights_after_rounds(
    model: ModelSpec, images: Tensor, *, rounds: int, clients: int = 4, steps: int = 5
) -> dict[str, Tensor]:
    """After rounds of FedAvg, every picture a class of its own: SGD on batches of 16, momentum."""
    weights = fresh_weights(model, images)
    net = build_model(model, image_size=images.shape[-1], num_classes=len(images), seed=0)
    protocol = Protocol(upload=Upload.DELTA, lr=0.01, momentum=0.9, mode="eval")
    for number in range(rounds):
        rows = torch.randperm(len(images), generator=coin(1000 + number))
        deltas = []
        for shard in rows.chunk(clients):
            net.load_state_dict(weights)
            some = [shard[torch.randperm(len(shard), generator=coin(s))[:16]] for s in range(steps)]
            deltas.append(local_update(net, [(images[r], r) for r in some], protocol).tensors)
        mean = {name: torch.stack([d[name] for d in deltas]).mean(0) for name in deltas[0]}
        weights = {n: t + mean[n] if n in mean else t for n, t in weights.items()}
    return weights


def trained_weights(name: str) -> dict[str, Tensor]:
    """Of a network that `experiments.training.cifar10` trained."""
    net = build_model(NETWORKS[name].model, image_size=32, num_classes=10, seed=0)
    load_checkpoint(net, CHECKPOINTS / f"{name}.safetensors")
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


# -- numbers and tables -------------------------------------------------------------------------


def best_match(images: Tensor, truths: Tensor) -> float:
    return max(float(psnr(truth[None], image[None])) for image in images for truth in truths)


def coin(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(*header: str) -> None:
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def mean_of(values: Sequence[float]) -> str:
    """The mean with its 95 % interval by Student's t."""
    half = (
        float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    )
    return f"{statistics.mean(values):.1f} +- {half:.1f}"
