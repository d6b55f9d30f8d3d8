"""Label rules: granted, read or searched."""

from __future__ import annotations

import torch

from fedsim.attacks import create_attack
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Secrets, View, granted_by
from fedsim.core.spec import ThreatSpec
from tests.staging import (
    CPU,
    convnet,
    several_steps,
)


def test_oracle_labels_say_how_many_pictures_there_were() -> None:
    observation, _ = several_steps()
    granted = granted_by(ThreatSpec(model="C", oracle_labels=True))
    view = View(observation, granted, Announced(convnet), secrets=Secrets(torch.tensor([1])))
    result = create_attack("inverting_gradients", steps=2).reconstruct(
        view, device=CPU, progress=no_progress
    )
    assert len(result.images) == 1


def test_labels_are_searched_as_logits_where_a_spec_says_so() -> None:
    observation, _ = several_steps()
    view = View(observation, THREATS["C"].grants, Announced(convnet))
    made = create_attack("inverting_gradients", labels="joint", seeds=2)
    problem = made.problem(view, CPU)
    assert made.find_labels(problem, 2).shape == (2, problem.count, 8)
    assert made.find_labels(problem, 2).is_floating_point()
