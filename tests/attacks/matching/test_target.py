"""Targets: which layers of an update are matched, and as what."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.errors import AttackError
from fedsim.core.metrics import psnr
from tests.staging import (
    TINY,
    attack,
    convnet,
    convnet_observation,
    observe,
    photos,
    several_steps,
)


def test_only_the_selected_layers_are_matched() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    whole = attack(observation, "inverting_gradients", steps=2)
    part = attack(observation, "inverting_gradients", steps=2, parts=["attention"], blocks=[2, 2])
    assert whole.loss != part.loss
    with pytest.raises(AttackError, match="not 7 to 9"):
        attack(observation, "inverting_gradients", steps=2, blocks=[7, 9])


def test_an_update_with_missing_layers_is_matched_by_the_rest() -> None:
    observation, images = convnet_observation()
    for name in ("0.weight", "0.bias"):
        del observation.update.tensors[name]
    found = attack(observation, "inverting_gradients", convnet, steps=150, tv=1e-3)
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 2


def test_matching_declines_layers_the_model_does_not_have() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["strange.weight"] = torch.ones(2)
    with pytest.raises(AttackError, match="strange"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_the_size_of_a_gradient_cannot_be_guessed_from_a_delta() -> None:
    observation, _ = several_steps()
    with pytest.raises(AttackError, match="cosine"):
        attack(observation, "dlg", convnet, threat="B", steps=2)
