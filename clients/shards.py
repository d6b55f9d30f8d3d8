"""Shards: which samples a client holds, and which it learns from in a round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.clients.data.datasets import load_images
from fedsim.clients.data.partitions import partition
from fedsim.clients.data.pictures import ImageSet, Part, Remembered
from fedsim.core.epochs import epoch_rows
from fedsim.core.errors import DataError
from fedsim.core.learning import Batch
from fedsim.core.spec import DataSpec, Spec, TrainSpec
from fedsim.defenses.applied import declared

Drawn = tuple[list[int], Batch]  # one step: where its samples are in the data set, and they


@functools.lru_cache(maxsize=4)
def images_of(data: DataSpec, split: str) -> Remembered:
    """The data set, indexed once per process; pictures are read when asked for, and kept."""
    return Remembered(load_images(data, "train" if split == "train" else "test"))


def undealt(data: DataSpec) -> DataSpec:
    """The data set alone, whoever holds which part of it."""
    return DataSpec(name=data.name, path=data.path, image_size=data.image_size, label=data.label)


@functools.lru_cache(maxsize=4)
def shards_of(data: DataSpec, seed: int) -> tuple[np.ndarray, ...]:
    """The samples of every client."""
    images = images_of(data, "train")
    return tuple(partition(images.labels, data.partition, data.clients, seed, images.groups))


def check_shards(spec: Spec) -> None:
    """Refuse a spec whose batches do not fit its shards, before any round runs."""
    sizes = [len(shard) for shard in shards_of(spec.data, spec.seed)]
    smallest = int(np.argmin(sizes))
    size, train = spec.train.step_size, spec.train
    if size > sizes[smallest]:
        several = f" and train.accumulate {train.accumulate}" if train.accumulate > 1 else ""
        raise DataError(
            f"train.batch_size is {train.batch_size}{several}, but client {smallest} holds only "
            f"{sizes[smallest]} samples; use fewer clients, a smaller batch or an even partition."
        )


@dataclass(frozen=True)
class Holding:
    """What a client holds: samples of its own, and the public test split."""

    indices: np.ndarray  # where its samples are in the whole data set
    own: ImageSet  # the sample of each index
    test: Callable[[], ImageSet]  # opened when it is asked for


def simulated_holding(spec: Spec, client: int) -> Holding:
    """A client's share of the data set that the spec names."""
    indices = shards_of(spec.data, spec.seed)[client]
    samples = Part(images_of(spec.data, "train"), indices)
    return Holding(indices, samples, lambda: images_of(spec.data, "test"))


def draw_batches(
    spec: Spec,
    round_: int,
    client: int,
    held: Holding | None = None,
    secret: int | None = None,
) -> list[Drawn]:
    """What a client learns from in a round: sample indices and (images, labels) for each step.

    The draw depends on seed, client and round alone, so every engine draws the same; or on the
    client's ``secret`` alone, where it has one of its own. A client that holds nothing of its own
    draws from its share of the spec's data set.
    """
    held = held or simulated_holding(spec, client)
    coin = np.random.default_rng([spec.seed, client, round_] if secret is None else secret)
    batches = []
    defenses, labels = declared(spec.defenses), held.own.labels
    for drawn in _steps(np.arange(len(labels)), spec.train, coin):
        chosen = drawn
        for defense in defenses:
            other = defense.choose(labels, len(drawn), coin)
            chosen = other if other is not None else chosen
        pictures = torch.stack([held.own.image(int(row)) for row in chosen])
        targets = torch.tensor(labels[chosen], dtype=torch.long)
        batches.append(([int(index) for index in held.indices[chosen]], (pictures, targets)))
    return batches


def _steps(rows: np.ndarray, train: TrainSpec, coin: np.random.Generator) -> list[np.ndarray]:
    size = train.step_size
    if train.local_epochs:
        orders = [coin.permutation(rows) for _ in range(train.local_epochs)]
        kept = len(rows) - len(rows) % size if train.drop_last else len(rows)
        return [order[step] for order in orders for step in epoch_rows(kept, size)]
    steps: list[np.ndarray] = []
    order = coin.permutation(rows)
    for _ in range(train.local_steps or 1):
        if len(order) < size:
            order = coin.permutation(rows)
        steps.append(order[:size])
        order = order[size:]
    return steps
