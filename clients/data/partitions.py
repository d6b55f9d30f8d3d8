"""Partitions: who holds which sample, by flwr-datasets' partitioners on indices and labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedsim.core.errors import DataError
from fedsim.core.spec import PartitionSpec

_DIRICHLET_SEEDS = 10  # for each, the partitioner itself draws eleven times before it gives up


def partition(
    labels: np.ndarray,
    spec: PartitionSpec,
    clients: int,
    seed: int,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Indices of each client's samples, int64; the same seed gives the same partition.

    No sample goes to two clients and no client goes empty. ``iid``, ``dirichlet`` and ``natural``
    give away every sample; ``pathological`` leaves out the classes that no client drew, ``shard``
    what remains when the samples are divided into equal shards. ``natural`` gives all samples of a
    group to one client.
    """
    if clients > len(labels):
        raise DataError(
            f"{clients} clients cannot share {len(labels)} samples; lower data.clients."
        )
    if spec.kind == "natural":
        return _natural(groups, clients, seed)
    # It takes seconds to import and half of the processes never partition anything.
    from flwr_datasets import partitioner

    if spec.kind == "iid":
        return _assign(labels, partitioner.IidPartitioner(clients), seed)
    if spec.kind == "dirichlet":
        # The partitioner cuts each class after whole samples, rounded down: of small classes the
        # last client would get most, and of classes with one sample all.
        small = len(labels) < clients * len(np.unique(labels))
        draw = _dirichlet_by_sample if small else _dirichlet
        return draw(labels, spec.alpha, clients, seed)
    if spec.kind == "pathological":
        classes = len(np.unique(labels))
        if spec.classes_per_client > classes:
            raise DataError(
                f"data.partition.classes_per_client is {spec.classes_per_client} but the data "
                f"set has {classes} classes; lower it."
            )
        chooser = partitioner.PathologicalPartitioner(
            clients,
            "label",
            spec.classes_per_client,
            # As in the FedAvg paper's own split: no class is left out while clients are enough.
            class_assignment_mode="first-deterministic",
            seed=seed,
        )
        advice = "lower data.clients or data.partition.classes_per_client"
    else:
        chooser = partitioner.ShardPartitioner(
            clients, "label", num_shards_per_partition=spec.shards_per_client, seed=seed
        )
        advice = "lower data.clients or data.partition.shards_per_client"
        if clients * spec.shards_per_client > len(labels):
            raise DataError(
                f"{clients} clients x {spec.shards_per_client} shards cannot be cut from "
                f"{len(labels)} samples; {advice}."
            )
    try:
        return _assign(labels, chooser, seed)
    except ValueError as error:
        raise DataError(
            f"a {spec.kind} partition over {clients} clients needs more samples of some class "
            f"than there are; {advice}."
        ) from error


def _dirichlet(labels: np.ndarray, alpha: float, clients: int, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import DirichletPartitioner

    # A small alpha often leaves a client with nothing; other draws of the same law may not.
    for retry in range(_DIRICHLET_SEEDS):
        drawn = seed if retry == 0 else int(np.random.default_rng([seed, retry]).integers(2**31))
        chooser = DirichletPartitioner(
            clients, "label", alpha, min_partition_size=1, self_balancing=False, seed=drawn
        )
        try:
            return _assign(labels, chooser, seed)
        except ValueError:
            continue
    raise _without(alpha, clients)


def _dirichlet_by_sample(
    labels: np.ndarray, alpha: float, clients: int, seed: int
) -> list[np.ndarray]:
    """Each sample's client is drawn on its own, by its class's share of the clients."""
    _, sizes = np.unique(labels, return_counts=True)
    of_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    coin = np.random.default_rng([seed, 1])
    owner = np.empty(len(labels), dtype=np.int64)
    for _ in range(11 * _DIRICHLET_SEEDS):
        for rows in of_class:
            bounds = np.cumsum(coin.dirichlet([alpha] * clients))[:-1]
            owner[rows] = np.searchsorted(bounds, coin.random(len(rows)), side="right")
        if len(np.unique(owner)) == clients:
            return _of_each(owner, clients)
    raise _without(alpha, clients)


def _without(alpha: float, clients: int) -> DataError:
    return DataError(
        f"a dirichlet partition with alpha {alpha:g} leaves some of the {clients} clients without "
        "a sample; raise data.partition.alpha or lower data.clients."
    )


def _natural(groups: np.ndarray | None, clients: int, seed: int) -> list[np.ndarray]:
    """Whole groups, dealt out like cards: the numbers of groups differ by one at most.

    Not with flwr-datasets' GroupedNaturalIdPartitioner, which fixes the groups of a client and so
    cannot be asked for so many clients: 10 groups never make 4 clients with it.
    """
    if groups is None:
        raise DataError(
            "a natural partition needs to know whose picture each is, and this data set does not "
            "say it: celeba does in identity_CelebA.txt, a tree by folders class/person/picture; "
            "use another data.partition.kind."
        )
    people, number = np.unique(groups, return_inverse=True)
    if clients > len(people):
        raise DataError(
            f"a natural partition cannot deal the pictures of {len(people)} people to {clients} "
            "clients; lower data.clients."
        )
    owner = np.empty(len(people), dtype=np.int64)
    owner[np.random.default_rng(seed).permutation(len(people))] = np.arange(len(people)) % clients
    return _of_each(owner[number], clients)


def _of_each(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _assign(labels: np.ndarray, chooser: Any, seed: int) -> list[np.ndarray]:
    from datasets import Dataset

    class Table(Dataset):
        """Gives a column at once: row by row, a million samples would take minutes."""

        def __getitem__(self, key: Any) -> Any:
            value = super().__getitem__(key)
            return value[:] if isinstance(key, str) else value

    # Shuffled first: most partitioners cut each class in the order in which it comes.
    order = np.random.default_rng(seed).permutation(len(labels))
    with _quiet():
        chooser.dataset = Table.from_dict({"index": order, "label": labels[order]})
        return [
            np.asarray(chooser.load_partition(client)["index"][:], dtype=np.int64)
            for client in range(chooser.num_partitions)
        ]


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars for a table of numbers, no warning for each repeated draw."""
    import datasets

    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            datasets.enable_progress_bars()
