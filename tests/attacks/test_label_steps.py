"""Counts behind several local steps, by simulating the head's bias."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.label_steps import read_off, trust
from fedsim.attacks.labels import recover_labels
from fedsim.core.epochs import epoch_rows
from fedsim.core.learning import Protocol, local_update
from fedsim.core.optimizers import OptimizerName
from fedsim.core.trainable import restricted
from tests.attacks.test_labels import photos, right, vit

SHARD, BATCH, CLIENTS = 16, 4, 8


def shares_of_right_labels(optimizer: OptimizerName, epochs: int) -> tuple[float, float]:
    """With the client's steps followed, and without knowing of them: the means over clients, each
    with photos of few classes, in another order in every epoch."""
    model, coin = restricted(vit(), "head"), torch.Generator().manual_seed(0)
    protocol = Protocol(upload="delta", optimizer=optimizer, lr=0.001, weight_decay=0.01)
    images, followed, blind = photos(SHARD, step=11), [], []
    for _ in range(CLIENTS):
        shares = torch.rand(8, generator=coin) ** 4
        labels = torch.multinomial(shares, SHARD, True, generator=coin)
        batches = []
        for _ in range(epochs):
            order = torch.randperm(SHARD, generator=coin)
            rows = [order[list(r)] for r in epoch_rows(SHARD, BATCH)]
            batches += [(images[r], labels[r]) for r in rows]
        update = local_update(model, batches, protocol)
        steps = {"steps": len(batches), "epochs": epochs}
        followed.append(
            right(recover_labels(update, model, SHARD, protocol=protocol, **steps), labels)
        )
        blind.append(right(recover_labels(update, model, SHARD), labels))
    return sum(followed) / CLIENTS, sum(blind) / CLIENTS


@pytest.mark.parametrize(("optimizer", "epochs"), [("adam", 1), ("adam", 3), ("adamw", 3)])
def test_following_adam_over_epochs_finds_more_labels_than_signs_do(
    optimizer: OptimizerName, epochs: int
) -> None:
    followed, blind = shares_of_right_labels(optimizer, epochs)
    assert followed > 0.75
    assert followed > blind


def test_a_curve_is_read_where_it_was_made() -> None:
    """Of bias moves that were simulated with known counts and predictions alike for all."""
    protocol = Protocol(upload="delta", optimizer="adam", lr=0.001)
    bias, shares = torch.zeros(4), torch.tensor([0.5, 0.25, 0.25, 0.0])
    at, first, second = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    for step in range(1, 5):
        gradient = 0.25 - shares
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        at = at - 0.001 * first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    found = read_off(at.double(), bias, protocol, count=16, steps=4, epochs=4)  # one batch an epoch
    assert found.argmax() == 0
    assert float(found[3]) < 0.1


def test_a_mean_loss_tells_how_far_predictions_know_their_labels() -> None:
    even = torch.full((4,), 0.25)
    assert trust(float(torch.tensor(4.0).log()), even, even) == 0.0
    assert trust(float("nan"), even, even) == 0.0
    known = 0.6
    loss = -float(torch.log(torch.tensor((1 - known) * 0.25 + known)))
    assert trust(loss, even, even) == pytest.approx(known, abs=1e-3)


def test_a_loss_that_no_cross_entropy_has_is_not_believed() -> None:
    even = torch.full((4,), 0.25)
    assert trust(0.0, even, even) == 0.0  # of a captured app whose clients report none
    assert trust(-1.0, even, even) == 0.0
