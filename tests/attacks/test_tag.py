"""TAG: squared l2 with an l1 term beside it."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.matching.objectives import Target
from fedsim.attacks.tag import TagAttack
from tests.attacks.conftest import assert_far_better_than_a_guess, view_of
from tests.staging import CPU, convnet_observation


def test_tag_recovers_an_image_far_better_than_a_guess() -> None:
    assert_far_better_than_a_guess("tag", steps=200)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 5.0), (0.01, 5.03)])
def test_alpha_weighs_the_absolute_differences(alpha: float, expected: float) -> None:
    observation, _ = convnet_observation()
    attack = TagAttack(alpha=alpha)
    objective = attack.objective(attack.task(view_of(observation, "B"), CPU).problem)
    target = Target({"a": torch.tensor([1.0, 1.0])})
    found = objective([torch.tensor([[2.0, -1.0]])], target)  # apart by 1 and by 2
    assert float(found.value) == pytest.approx(expected)
