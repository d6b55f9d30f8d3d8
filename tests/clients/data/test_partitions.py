"""Partitions: who holds which sample, and what is said when it cannot be done."""

from __future__ import annotations

import warnings
from typing import Any

import datasets
import numpy as np
import pytest

from fedsim.clients.data.partitions import partition
from fedsim.core.errors import DataError
from fedsim.core.spec import PartitionSpec

LABELS = np.repeat(np.arange(8), 64)
KINDS = ["iid", "dirichlet", "pathological", "shard"]


def _classes(parts: list[np.ndarray]) -> list[int]:
    return [len(np.unique(LABELS[part])) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_with_exactly_one_client(kind: Any) -> None:
    parts = partition(LABELS, PartitionSpec(kind=kind), 8, 0)
    assert len(parts) == 8
    assert all(part.dtype == np.int64 and len(part) for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: Any) -> None:
    spec = PartitionSpec(kind=kind)
    first, again, other = (partition(LABELS, spec, 5, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_clients_hold_all_classes_in_equal_sizes() -> None:
    parts = partition(LABELS, PartitionSpec(kind="iid"), 8, 0)
    assert {len(part) for part in parts} == {64}
    assert min(_classes(parts)) >= 7


def test_a_smaller_alpha_is_more_uneven() -> None:
    def evenness(alpha: float) -> float:
        parts = partition(LABELS, PartitionSpec(kind="dirichlet", alpha=alpha), 6, 0)
        return float(np.mean([np.bincount(LABELS[p], minlength=8).max() / len(p) for p in parts]))

    assert evenness(0.1) > evenness(1.0) > evenness(100.0)


def test_pathological_clients_hold_so_many_classes() -> None:
    parts = partition(LABELS, PartitionSpec(kind="pathological", classes_per_client=3), 10, 0)
    assert _classes(parts) == [3] * 10


def test_shards_hold_few_classes_and_may_leave_a_remainder() -> None:
    parts = partition(LABELS, PartitionSpec(kind="shard", shards_per_client=2), 10, 0)
    assert {len(part) for part in parts} == {50}
    assert max(_classes(parts)) <= 4
    held = np.concatenate(parts)
    assert len(set(held.tolist())) == len(held)


def test_one_client_may_hold_everything_and_each_client_one() -> None:
    (everything,) = partition(LABELS, PartitionSpec(), 1, 0)
    assert sorted(everything) == list(range(512))
    assert [len(part) for part in partition(LABELS[:5], PartitionSpec(), 5, 0)] == [1] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_more_clients_than_samples_is_told(kind: Any) -> None:
    with pytest.raises(DataError, match=r"9 clients cannot share 8 samples; lower data\.clients"):
        partition(np.arange(8), PartitionSpec(kind=kind, classes_per_client=1), 9, 0)


def test_a_dirichlet_that_leaves_a_client_without_is_told() -> None:
    with pytest.raises(DataError, match=r"alpha 0\.001 leaves some of the 100 clients"):
        partition(LABELS, PartitionSpec(kind="dirichlet", alpha=0.001), 100, 0)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_dirichlet_spreads_classes_of_few_samples_over_all_clients(each: int) -> None:
    labels = np.repeat(np.arange(200), each)
    spec = PartitionSpec(kind="dirichlet", alpha=0.5)
    parts, again, other = (partition(labels, spec, 4, seed) for seed in (0, 0, 1))
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    # A client's share of a class has the mean 1/4 and the same law for every client.
    assert all(0.15 < len(part) / len(labels) < 0.35 for part in parts)


def test_natural_clients_are_groups_of_whole_people() -> None:
    people = np.random.default_rng(0).integers(100, 110, len(LABELS))
    spec = PartitionSpec(kind="natural")
    parts, again, other = (partition(LABELS, spec, 4, seed, people) for seed in (0, 0, 1))
    assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))
    held = [set(people[part].tolist()) for part in parts]
    assert sorted(len(own) for own in held) == [2, 2, 3, 3]
    assert sum(len(own) for own in held) == len(set.union(*held)) == 10
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert held != [set(people[part].tolist()) for part in other]


def test_a_natural_partition_without_people_or_with_too_few_is_told() -> None:
    with pytest.raises(DataError, match="needs to know whose picture each is"):
        partition(LABELS, PartitionSpec(kind="natural"), 4, 0)
    with pytest.raises(DataError, match=r"pictures of 8 people to 9 clients; lower"):
        partition(LABELS, PartitionSpec(kind="natural"), 9, 0, LABELS)


def test_more_classes_a_client_than_there_are_is_told() -> None:
    with pytest.raises(DataError, match="classes_per_client is 9 but the data set has 8 classes"):
        partition(LABELS, PartitionSpec(kind="pathological", classes_per_client=9), 4, 0)


def test_too_few_samples_of_a_class_is_told() -> None:
    with pytest.raises(DataError, match="needs more samples of some class"):
        partition(np.arange(8), PartitionSpec(kind="pathological", classes_per_client=4), 6, 0)


def test_too_many_shards_is_told() -> None:
    with pytest.raises(DataError, match="6 clients x 2 shards cannot be cut from 8 samples"):
        partition(np.arange(8), PartitionSpec(kind="shard"), 6, 0)


def test_partitioning_is_silent_and_leaves_the_progress_bars_as_they_were(
    capfd: pytest.CaptureFixture[str],
) -> None:
    datasets.enable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in KINDS:
            partition(LABELS, PartitionSpec.model_validate({"kind": kind, "alpha": 0.2}), 8, 0)
    assert not datasets.are_progress_bars_disabled()
    assert capfd.readouterr() == ("", "")
