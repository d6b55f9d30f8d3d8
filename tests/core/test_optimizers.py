"""Optimisers and learning rates: torch's own, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fedsim.core.optimizers import OptimizerName, Schedule, create_optimizer

STEPS = 12
SCHEDULERS: dict[str, tuple[Schedule, Callable[[torch.optim.Optimizer], object]]] = {
    "cosine": (
        Schedule("cosine", final=0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.05),
    ),
    "linear": (
        Schedule("linear", final=0.2),
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, STEPS),
    ),
    "step": (
        Schedule("step", every=4, factor=0.5),
        lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    ),
    "one_cycle": (
        Schedule("one_cycle", rise=0.25),
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, STEPS, pct_start=0.25, cycle_momentum=False),
    ),
    "constant": (Schedule(), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_is_torchs_of_that_name(name: str) -> None:
    schedule, make = SCHEDULERS[name]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make(optimizer)
    for at in range(STEPS):
        assert 0.5 * schedule.share(at, STEPS) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_of_one_step_begins_at_the_whole_rate(name: str) -> None:
    assert SCHEDULERS[name][0].share(0, 1) == 1.0


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")])
def test_an_optimizer_is_torchs_with_the_announced_numbers(name: OptimizerName, kind: str) -> None:
    weight = nn.Parameter(torch.zeros(1))
    made = create_optimizer(
        [weight], name, lr=0.1, momentum=0.5, betas=(0.8, 0.9), weight_decay=0.01
    )
    (group,) = made.param_groups
    assert type(made).__name__ == kind
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert group.get("momentum", 0.5) == 0.5
