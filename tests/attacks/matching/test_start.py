"""Starts: where a search sets out from."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from tests.staging import (
    CPU,
    TINY,
    attack,
    observe,
    photos,
)


def test_a_closed_form_is_a_start_for_matching() -> None:
    images, labels = photos(32, [70])
    observation = observe(TINY, images, labels)
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2, lr=1e-6)
    assert float(psnr(images, result.images)) > 60
    del observation.update.tensors["pos_embed"]
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2)
    assert any("no closed form to start from" in note for note in result.notes)


@pytest.mark.parametrize("init", ["noise", "uniform", "grey"])
def test_every_seed_starts_somewhere_else_and_the_same_each_time(init: str) -> None:
    images, labels = photos(32, [5, 100])
    view = View(
        observe(TINY, images, labels),
        THREATS["B"].grants,
        Announced(lambda: build_model(TINY, image_size=32, num_classes=8, seed=0)),
    )
    made = create_attack("inverting_gradients", init=init, seeds=3)
    problem = made.problem(view, CPU)
    start = made.start(problem)
    assert start.shape == (3, 2, 3, 32, 32)
    assert not torch.equal(start[0], start[1])
    assert torch.equal(start, made.start(problem))
