"""Shards: which samples a client holds, and which it learns from in a round."""

from __future__ import annotations

import functools

import numpy as np
import torch

from clients.datasets import ImageSet, load_images
from clients.partitions import partition
from clients.pictures import Remembered
from defenses import create_defenses
from fedsim.core.errors import DataError
from fedsim.core.learning import Batch
from fedsim.core.spec import DataSpec, Spec, TrainSpec


@functools.lru_cache(maxsize=4)
def images_of(data: DataSpec, split: str) -> ImageSet:
    """The data set, indexed once a process; pictures are read when asked for, and kept."""
    return Remembered(load_images(data, "train" if split == "train" else "test"))


@functools.lru_cache(maxsize=4)
def shards_of(data: DataSpec, seed: int) -> tuple[np.ndarray, ...]:
    """The samples of every client."""
    images = images_of(data, "train")
    return tuple(partition(images.labels, data.partition, data.clients, seed, images.groups))


def check_shards(spec: Spec) -> None:
    """Refuse a spec whose batches do not fit its shards, before any round runs."""
    sizes = [len(shard) for shard in shards_of(spec.data, spec.seed)]
    smallest = int(np.argmin(sizes))
    if spec.train.batch_size > sizes[smallest]:
        raise DataError(
            f"train.batch_size is {spec.train.batch_size}, but client {smallest} holds only "
            f"{sizes[smallest]} samples; use fewer clients, a smaller batch or an even partition."
        )


def draw_batches(spec: Spec, round_: int, client: int) -> list[tuple[list[int], Batch]]:
    """What a client learns from in a round: sample indices and (images, labels), a step each.

    The draw depends on seed, client and round alone, so every engine draws the same.
    """
    images = images_of(spec.data, "train")
    shard = shards_of(spec.data, spec.seed)[client]
    coin = np.random.default_rng([spec.seed, client, round_])
    batches = []
    defenses, held = create_defenses(spec.defenses), images.labels[shard]
    for drawn in _steps(shard, spec.train, coin):
        chosen = drawn
        for defense in defenses:
            other = defense.choose(held, len(drawn), coin)
            chosen = shard[other] if other is not None else chosen
        pictures = torch.stack([images.image(int(index)) for index in chosen])
        labels = torch.tensor(images.labels[chosen], dtype=torch.long)
        batches.append(([int(index) for index in chosen], (pictures, labels)))
    return batches


def _steps(shard: np.ndarray, train: TrainSpec, coin: np.random.Generator) -> list[np.ndarray]:
    size = train.batch_size
    if train.local_epochs:
        orders = [coin.permutation(shard) for _ in range(train.local_epochs)]
        return [order[at : at + size] for order in orders for at in range(0, len(order), size)]
    steps: list[np.ndarray] = []
    order = coin.permutation(shard)
    for _ in range(train.local_steps or 1):
        if len(order) < size:
            order = coin.permutation(shard)
        steps.append(order[:size])
        order = order[size:]
    return steps
