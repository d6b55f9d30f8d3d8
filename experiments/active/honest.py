"""Honest rounds: small federations in one process, and what each client has before it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.clients import images_of
from fedsim.core.guard import Guard, Scene
from fedsim.core.learning import Batch, Protocol, Update, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import DataSpec, ModelSpec, Upload

CLIENTS, COHORT = 5, 3
SHARD = 64  # pictures of a client


@dataclass(frozen=True)
class Federation:
    """One honest federation: its model and where that begins, its data, how its clients learn."""

    name: str = "vit_tiny_patch16_224"
    options: dict[str, Any] = field(default_factory=dict)
    size: int = 32
    batch: int = 8
    labels: str = "iid"  # or "skewed", two labels a client, or "single"
    upload: Upload = Upload.GRADIENT
    lr: float = 0.05
    steps: int = 1
    optimizer: str = "sgd"
    trained: int = 0  # steps on everybody's pictures before the first round
    rounds: int = 4
    data: str = "photos"
    path: str | None = None

    @property
    def protocol(self) -> Protocol:
        return Protocol(upload=self.upload, optimizer=self.optimizer, lr=self.lr)  # type: ignore[arg-type]

    @property
    def title(self) -> str:
        patch = f"/{self.options['patch_size']}" if "patch_size" in self.options else ""
        return f"{self.name}{patch} at {self.size}, {'trained' if self.trained else 'fresh'}"


def scenes(federation: Federation, seed: int, guards: list[Guard]) -> Iterator[Scene]:
    """What every client has before it in every round, with what its guards kept; each is to be
    looked at before the next is asked for."""
    coin = np.random.default_rng(seed)
    pictures, labels = pictures_of(federation.data, federation.path, federation.size)
    shards = _shards(labels, federation.labels, coin)
    model = start_of(federation, seed)
    kept: dict[int, dict[str, Tensor]] = {}
    before = 10 if federation.trained else 0  # a trained model is not met in a first round
    for round_ in range(before + 1, before + federation.rounds + 1):
        updates = []
        for client in sorted(coin.permutation(CLIENTS)[:COHORT].tolist()):
            batches = []
            for _ in range(federation.steps):
                size = min(federation.batch, len(shards[client]))
                rows = coin.choice(shards[client], size, replace=False)
                batches.append((pictures[rows], labels[rows]))
            scene = Scene(round_, client, model, batches, federation.protocol, kept.get(client, {}))
            yield scene
            kept[client] = {n: t for guard in guards for n, t in guard.keep(scene).items()}
            updates.append(local_update(model, batches, federation.protocol, seed=seed))
        _aggregate(model, updates, federation)


@cache
def pictures_of(data: str, path: str | None, size: int) -> tuple[Tensor, Tensor]:
    """A few hundred pictures (N, 3, S, S) in [0, 1] and their labels."""
    images = images_of(DataSpec(name=data, path=path, image_size=size), "train")
    rows = np.random.default_rng(0).permutation(len(images))[:480]
    pictures = torch.stack([images.image(int(row)) for row in rows])
    return pictures, torch.as_tensor(images.labels[rows])


def _shards(labels: Tensor, kind: str, coin: np.random.Generator) -> list[np.ndarray]:
    names = labels.numpy()
    classes = np.unique(names)
    shards = []
    for _ in range(CLIENTS):
        own = classes
        if kind != "iid":
            own = coin.permutation(classes)[: 2 if kind == "skewed" else 1]
        rows = np.flatnonzero(np.isin(names, own))
        shards.append(coin.permutation(rows)[:SHARD])
    return shards


_trained: dict[str, dict[str, Tensor]] = {}


def start_of(federation: Federation, seed: int) -> nn.Module:
    """The model before the first round, trained for so many steps of 32 pictures."""
    pictures, labels = pictures_of(federation.data, federation.path, federation.size)
    spec = ModelSpec(name=federation.name, options=federation.options)
    classes = int(labels.max()) + 1
    model = build_model(spec, image_size=federation.size, num_classes=classes, seed=seed)
    if not federation.trained:
        return model.train()
    key = f"{spec} {federation.size} {federation.trained} {federation.data} {seed}"
    if key not in _trained:
        coin = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(federation.trained):
            rows = torch.randint(0, len(labels), (32,), generator=coin)
            loss = F.cross_entropy(
                model(federation.protocol.normalise(pictures[rows])), labels[rows]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _trained[key] = copy.deepcopy(model.state_dict())
    model.load_state_dict(_trained[key])
    return model.train()


@torch.no_grad()
def _aggregate(model: nn.Module, updates: list[Update], federation: Federation) -> None:
    """The mean of gradients, a step of it, or of weight deltas; and of BatchNorm's buffers."""
    scale = -federation.lr if federation.upload is Upload.GRADIENT else 1.0
    for name, parameter in model.named_parameters():
        mean = torch.stack([update.tensors[name] for update in updates]).mean(dim=0)
        parameter.add_(mean, alpha=scale)
    for name, buffer in model.named_buffers():
        if name in updates[0].buffers:
            mean = torch.stack([update.buffers[name].float() for update in updates]).mean(dim=0)
            buffer.copy_(mean.to(buffer.dtype))


def first_batch(federation: Federation, seed: int, size: int) -> Batch:
    """Pictures of distinct labels as far as there are, for a server that fishes one label."""
    pictures, labels = pictures_of(federation.data, federation.path, federation.size)
    coin = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(labels), generator=coin)
    target = rows[0]
    others = [row for row in rows[1:].tolist() if labels[row] != labels[target]]
    chosen = torch.tensor([int(target), *others[: size - 1]])
    return pictures[chosen], labels[chosen]
