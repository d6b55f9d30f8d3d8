"""Inverting Gradients: direction, box, and the same picture twice."""

from __future__ import annotations

import torch

from tests.attacks.conftest import assert_far_better_than_a_guess
from tests.staging import TINY, attack, observe, photos


def test_inverting_gradients_recovers_an_image_far_better_than_a_guess() -> None:
    assert_far_better_than_a_guess("inverting_gradients", steps=200, tv=1e-3)


def test_inverting_gradients_works_through_attention_and_repeats_itself() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    first = attack(observation, "inverting_gradients", steps=4)
    second = attack(observation, "inverting_gradients", steps=4)
    assert torch.equal(first.images, second.images)
    assert first.loss is not None
    assert first.loss < 1.2
