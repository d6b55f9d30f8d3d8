"""L-BFGS: it finds minima that are known, in a box as well, and its loss never rises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fedsim.attacks.matching.lbfgs import Lbfgs


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()


def descended(
    loss: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    *,
    low: float = -10.0,
    high: float = 10.0,
    rate: float = 1.0,
) -> tuple[Tensor, list[float]]:
    descent, point, accepted = Lbfgs(rate), start.double(), list[float]()
    for _ in range(steps):
        x = point.clone().requires_grad_(True)
        value = loss(x)
        (slope,) = torch.autograd.grad(value, x)
        towards = (point - 1e-3 * slope.sign()).clamp(low, high)
        free = ((towards != point) | (slope == 0)).double()
        point = descent.next(point, float(value.detach()), slope, free).clamp(low, high)
        assert descent.point is not None
        accepted.append(float(loss(descent.point)))
    assert descent.point is not None
    return descent.point, accepted


def test_it_finds_the_bottom_of_a_curved_valley() -> None:
    found, accepted = descended(rosenbrock, torch.tensor([-1.2, 1.0, -0.5, 0.8]), 150)
    assert torch.allclose(found, torch.ones(4).double(), atol=1e-4)
    assert all(after <= before for before, after in pairwise(accepted))


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e3])
def test_the_size_of_the_first_step_does_not_decide(rate: float) -> None:
    found, _ = descended(rosenbrock, torch.tensor([-1.2, 1.0]), 400, rate=rate)
    assert torch.allclose(found, torch.ones(2).double(), atol=1e-2)


def test_a_minimum_on_the_wall_of_the_box_is_found_there() -> None:
    def bowl(x: Tensor) -> Tensor:
        return ((x - torch.tensor([3.0, 0.25]).double()) * torch.tensor([1.0, 5.0])).square().sum()

    found, _ = descended(bowl, torch.tensor([-1.0, -1.0]), 40, low=-1.0, high=1.0)
    assert found.tolist() == pytest.approx([1.0, 0.25], abs=1e-4)


def test_a_loss_that_is_no_number_is_stepped_back_from() -> None:
    def broken(x: Tensor) -> Tensor:
        inside = (x - 1).square().sum()
        return inside * float("nan") if float(x.detach().abs().max()) > 2 else inside

    found, accepted = descended(broken, torch.tensor([0.0, 0.5]), 60, rate=100.0)
    assert accepted[-1] < 1e-6
    assert torch.allclose(found, torch.ones(2).double(), atol=1e-3)


def test_a_loss_that_moves_on_the_way_does_not_hold_it() -> None:
    descent, point, calls = Lbfgs(), torch.ones(3).double(), 0
    for calls in range(200):
        target = 1.0 if calls < 60 else -0.5  # the minimum jumps, and the old value was better
        value = (point - target).square().sum() + (0.0 if calls < 60 else 5.0)
        point = descent.next(point, float(value), 2 * (point - target), torch.ones(3).double())
    assert descent.point is not None
    assert torch.allclose(descent.point, torch.full((3,), -0.5).double(), atol=1e-3)
