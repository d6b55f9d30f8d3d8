"""Gates: what passes them, how it is counted, and where the next one is placed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fedsim.attacks.manoeuvres.fishing import Fishing
from fedsim.attacks.manoeuvres.gates import (
    Gate,
    Interval,
    Passed,
    features_of,
    first_interval,
    first_theta,
    made_up_pictures,
    narrowed,
    read_gate,
)
from fedsim.core.learning import Protocol
from tests.attacks.manoeuvres.stage import Stage, pictures
from tests.staging import convnet

C, D, TARGET = 10, 24, 3


def passed(gate: Gate, projections: list[float]) -> Passed:
    """What a batch of one class with these projections tells, through a real softmax."""
    v = gate.direction(D)
    coin = torch.Generator().manual_seed(5)
    features = torch.randn(len(projections), D, generator=coin)
    features += (torch.tensor(projections) - features @ v)[:, None] * v
    weight, bias = (t.requires_grad_() for t in gate.head(C, D, TARGET))
    labels = torch.full((len(projections),), TARGET)
    F.cross_entropy(features @ weight.T + bias, labels).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    return read_gate(gate, weight.grad.double(), bias.grad.double(), TARGET, len(projections))


def test_the_tail_of_a_gate_counts_one_picture_far_below_float32s_24_bits() -> None:
    gate = Gate.within(1, Interval(0.0, 1.0), steep=False)
    found = passed(gate, [0.8, 1.3, 1.5, 2.0])
    assert found.total == pytest.approx(math.exp(-48), rel=0.01)
    assert found.mean == pytest.approx(0.8, abs=1e-4)
    assert found.count == pytest.approx(1, abs=0.01)


def test_pictures_side_by_side_are_counted_as_so_many() -> None:
    gate = Gate.within(1, Interval(0.0, 1.0), steep=False)
    assert passed(gate, [0.5, 0.5, 0.5, 2.0]).count == pytest.approx(3, abs=0.02)
    shares = torch.tensor([1.0, math.exp(-60 * 0.02)])
    shares /= shares.sum()
    perplexity = float((-(shares * shares.log()).sum()).exp())
    assert passed(gate, [0.5, 0.52, 2.0]).count == pytest.approx(perplexity, abs=0.01)


@pytest.mark.parametrize("steep", [True, False])
def test_pictures_below_a_gate_are_counted_whole(steep: bool) -> None:
    gate = Gate.within(1, Interval(0.0, 1.0), steep=steep)
    found = passed(gate, [-0.9, -0.7, 3.0])
    assert (found.total, found.count) == (pytest.approx(2), pytest.approx(2))


def test_nothing_is_counted_where_nothing_passes() -> None:
    gate = Gate.within(1, Interval(0.0, 1.0), steep=True)
    assert passed(gate, [3.0, 4.0]) == Passed(0.0, None, 0.0)


def test_the_next_interval_is_narrower_and_holds_the_least() -> None:
    gate = Gate.within(1, Interval(0.0, 1.0), steep=False)
    (low, high, bounded), agrees = narrowed(gate, passed(gate, [0.5, 0.51, 0.9]))
    assert agrees
    assert bounded
    assert low < 0.5 < high
    assert high - low < 0.1


@pytest.mark.parametrize(
    ("projections", "held"), [([2.0, 3.0], 2.0), ([-2.0, -1.9, 5.0], -2.0), ([0.8, 0.9], 0.8)]
)
@pytest.mark.parametrize("steep", [True, False])
def test_what_lies_outside_the_interval_is_found_again(
    projections: list[float], held: float, steep: bool
) -> None:
    interval = Interval(0.0, 1.0)
    for _ in range(12):
        gate = Gate.within(1, interval, steep=steep)
        found = passed(gate, projections)
        if found.count is not None and 0 < found.count < 1.1:
            break
        interval, _ = narrowed(gate, found)
    assert found.mean == pytest.approx(held, abs=1e-3)


def test_the_first_guess_is_where_the_least_of_a_batch_lies() -> None:
    projections = torch.randn(500, generator=torch.Generator().manual_seed(0))
    low, high, _ = first_interval(projections, 16)
    assert -3.5 < low < -1.77 < high < -0.5
    assert first_theta(projections, 16) == pytest.approx(-1.53, abs=0.2)


def test_features_are_what_the_head_is_fed() -> None:
    model, images, protocol = convnet(), pictures(3, 16), Protocol()
    features = features_of(model, images, protocol)
    head = model[-1]
    assert torch.allclose(head(features), model(protocol.normalise(images)))


def test_made_up_pictures_are_pictures_of_many_features() -> None:
    images = made_up_pictures(32)
    assert images.shape == (64, 3, 32, 32)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    stage = Stage(Fishing())
    model, protocol = stage.brief().loaded(), stage.public.protocol
    real, made_up = (features_of(model, some, protocol).std(0) for some in (pictures(64), images))
    assert 0.3 < float(made_up.norm() / real.norm()) < 3
    assert 0.1 < float(images.std()) < 0.5
