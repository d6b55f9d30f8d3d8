"""Shards: who holds which sample, and what is drawn from them in a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.clients.shards import check_shards, draw_batches, images_of, shards_of
from fedsim.core.errors import DataError
from tests.conftest import small_spec


def test_shards_are_disjoint_and_hold_everything() -> None:
    spec = small_spec()
    shards = shards_of(spec.data, spec.seed)
    assert len(shards) == spec.data.clients
    together = np.concatenate(shards)
    assert sorted(together.tolist()) == list(range(len(images_of(spec.data, "train"))))


def test_a_round_and_a_client_draw_the_same_batch_each_time_and_others_another() -> None:
    spec = small_spec("train.batch_size=4")
    ((rows, (pictures, labels)),) = draw_batches(spec, 1, 0)
    ((again, (same, _)),) = draw_batches(spec, 1, 0)
    assert rows == again
    assert torch.equal(pictures, same)
    assert pictures.shape == (4, 3, 32, 32)
    assert draw_batches(spec, 2, 0)[0][0] != rows
    assert draw_batches(small_spec("train.batch_size=4", "seed=9"), 1, 0)[0][0] != rows
    held = set(shards_of(spec.data, spec.seed)[0].tolist())
    assert set(rows) <= held
    assert labels.tolist() == [int(images_of(spec.data, "train").labels[row]) for row in rows]


def test_steps_take_new_samples_and_epochs_go_over_all_of_them() -> None:
    delta = "train={upload: delta, batch_size: 3, local_steps: 4, evaluate: false}"
    steps = [rows for rows, _ in draw_batches(small_spec(delta), 1, 0)]
    assert [len(rows) for rows in steps] == [3] * 4
    assert len({row for rows in steps for row in rows}) == 12
    epochs = "train={upload: delta, batch_size: 50, local_epochs: 2, evaluate: false}"
    spec = small_spec(epochs)
    own = shards_of(spec.data, spec.seed)[0]
    drawn = [row for rows, _ in draw_batches(spec, 1, 0) for row in rows]
    assert sorted(drawn) == sorted([*own.tolist()] * 2)


def test_a_last_batch_that_is_not_full_can_be_left_out() -> None:
    spec = small_spec(
        "train={upload: delta, batch_size: 7, local_epochs: 2, drop_last: true, evaluate: false}"
    )
    steps = [rows for rows, _ in draw_batches(spec, 1, 0)]
    held = len(shards_of(spec.data, spec.seed)[0])
    assert held % 7
    assert [len(rows) for rows in steps] == [7] * (2 * (held // 7))


def test_a_batch_larger_than_the_shard_is_told() -> None:
    with pytest.raises(DataError, match=r"train\.batch_size is 400"):
        check_shards(small_spec("train.batch_size=400"))


def test_a_secret_decides_the_draw_alone_where_there_is_one() -> None:
    spec, secret = small_spec("train.batch_size=4"), 2**255 + 1
    ((first, _),) = draw_batches(spec, 1, 0, secret=secret)
    assert draw_batches(spec, 2, 0, secret=secret)[0][0] == first
    assert draw_batches(spec, 1, 0)[0][0] != first
    drawn = {tuple(draw_batches(spec, 1, 0, secret=secret + n)[0][0]) for n in range(8)}
    assert len(drawn) == 8
