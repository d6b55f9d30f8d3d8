"""Pulls: how far each step of SGD moves the weights, against running it."""

from __future__ import annotations

import pytest

from fedsim.attacks.pulls import kept_weight, momentum_pull, step_pulls
from fedsim.core.learning import Protocol
from fedsim.core.optimizers import Schedule

PROTOCOLS = {
    "plain": Protocol(upload="delta", lr=0.1),
    "momentum": Protocol(upload="delta", lr=0.1, momentum=0.9),
    "scheduled": Protocol(upload="delta", lr=0.1, momentum=0.5, schedule=Schedule("cosine")),
    "proximal": Protocol(upload="delta", lr=0.1, momentum=0.5, proximal=2.0),
}


def moved(protocol: Protocol, gradients: list[float], start: float = 0.0) -> float:
    """Where SGD on one number goes."""
    weight, memory = start, 0.0
    for gradient, rate in zip(gradients, protocol.rates(len(gradients)), strict=True):
        whole = gradient + protocol.weight_decay * weight + protocol.proximal * (weight - start)
        memory = protocol.momentum * memory + whole
        weight -= rate * memory
    return weight


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_delta_is_the_sum_of_the_gradients_by_their_pulls(name: str) -> None:
    protocol, gradients = PROTOCOLS[name], [1.0, -2.0, 0.5, 3.0]
    pulls = step_pulls(protocol, 4)
    total = sum(pull * gradient for pull, gradient in zip(pulls, gradients, strict=True))
    assert moved(protocol, gradients) == pytest.approx(-protocol.lr * total)
    assert momentum_pull(protocol, 4) == pytest.approx(sum(pulls))


def test_without_anything_else_every_step_counts_one() -> None:
    assert step_pulls(PROTOCOLS["plain"], 3) == [1.0, 1.0, 1.0]


def test_what_weight_decay_leaves_is_what_sgd_without_gradients_leaves() -> None:
    protocol = Protocol(
        upload="delta", lr=0.1, momentum=0.9, weight_decay=0.1, proximal=0.5,
        schedule=Schedule("linear"),
    )  # fmt: skip
    assert kept_weight(protocol, 5) == pytest.approx(moved(protocol, [0.0] * 5, start=1.0))
