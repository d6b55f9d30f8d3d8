"""Gradients of single pictures: those that `learn` takes, in the numbers that were uploaded."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fedsim.attacks.gradients import Gradients
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import local_update
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.defenses.applied import announced

PICTURES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def view_of(run: Run) -> View:
    observation = read_observation(list_observations(run.observations)[0])
    public = observation.public
    return View(observation, THREATS["C"].grants, Announced(lambda: announced(public)))


def gradients(view: View, numbers: int = 2**30, *, masked: bool = False, **tensors) -> Gradients:
    uploaded = tensors or view.update.tensors
    return Gradients.of(view, view.model(), uploaded, PICTURES, numbers=numbers, masked=masked)


def test_it_is_the_update_of_a_client_with_this_picture_alone(small_run: Run) -> None:
    view = view_of(small_run)
    ours = gradients(view)
    one = local_update(view.model(), [(PICTURES[:1], torch.tensor([3]))], view.protocol())
    assert torch.allclose(ours.of_one(PICTURES[0], 3), ours.flat(one.tensors), atol=1e-7)
    several = ours.of_all(PICTURES[:2], torch.tensor([3, 5]))
    assert torch.equal(several[0], ours.of_one(PICTURES[0], 3))
    assert ours.classes == 8


def test_only_what_was_uploaded_is_looked_at(small_run: Run) -> None:
    view = view_of(small_run)
    head = {"head.bias": view.update.tensors["head.bias"]}
    ours = gradients(view, **head)
    assert ours.of_one(PICTURES[0], 3).shape == (8,)
    hidden = {"head.bias": torch.tensor([1.0, 0, 0, 2, 0, 0, 0, 0])}
    assert gradients(view, masked=True, **hidden).flat(hidden).tolist() == [1, 2]
    with pytest.raises(AttackError, match="nothing that a gradient could be compared with"):
        gradients(view, **{"of.another.model": torch.ones(2)})


def test_of_more_than_can_be_held_some_are_drawn_the_same_for_all(small_run: Run) -> None:
    view = view_of(small_run)
    some, again = gradients(view, 5000), gradients(view, 5000)
    count = len(some.of_one(PICTURES[0], 3))
    assert 4500 < count < 5500
    assert torch.equal(some.flat(view.update.tensors), again.flat(view.update.tensors))


class Mixing(nn.Module):
    """A network in which pictures of a batch mind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(images).mean((2, 3)))


def test_beside_batchnorm_a_picture_is_not_alone(small_run: Run) -> None:
    view = view_of(small_run)
    model = Mixing().train()
    uploaded = {name: p.detach() for name, p in model.named_parameters()}
    ours = Gradients.of(view, model, uploaded, PICTURES, numbers=10**6, masked=False)
    assert len(ours.company) == len(PICTURES)
    alone = dataclasses.replace(ours, company=ours.company[:0])
    assert not torch.allclose(ours.of_one(PICTURES[0], 1), alone.of_one(PICTURES[0], 1))
