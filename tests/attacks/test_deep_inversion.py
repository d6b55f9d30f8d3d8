"""DeepInversion: BatchNorm statistics as the prior, of the batch where they can be had."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.attacks.deep_inversion import DeepInversion
from fedsim.core.knowledge import THREATS, Announced, Secrets, View
from fedsim.core.models import build_model
from fedsim.core.observation import Observation
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.conftest import assert_far_better_than_a_guess
from tests.staging import CPU, observe, photos

RESNET = ModelSpec(
    name="resnet18",
    options={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8},
)


def observed(batchnorm: str) -> Observation:
    images, labels = photos(32, [70, 20])
    return observe(RESNET, images, labels, TrainSpec(batch_size=2, batchnorm=batchnorm))


def notes(observation: Observation, which: str, threat: str = "C", statistics=None) -> list[str]:
    view = View(
        observation,
        THREATS[threat].grants,
        Announced(lambda: build_model(RESNET, image_size=32, num_classes=8, seed=0)),
        secrets=Secrets(statistics=statistics),
    )
    attack = create_attack("deep_inversion", batchnorm=which, engine="first_order")
    return attack.task(view, CPU).problem.notes


def test_deep_inversion_recovers_an_image_far_better_than_a_guess() -> None:
    found = assert_far_better_than_a_guess("deep_inversion", steps=200)
    assert any("no BatchNorm prior: it has no layer" in note for note in found.notes)


@pytest.mark.parametrize(
    ("which", "uploads", "words"),
    [
        ("running", "shared", "BatchNorm prior: the model's running statistics"),
        ("exact", "shared", "BatchNorm prior: statistics of the batch, from the uploaded buffers"),
        ("auto", "shared", "BatchNorm prior: statistics of the batch, from the uploaded buffers"),
        ("auto", "local", "BatchNorm prior: the model's running statistics"),
        ("exact", "local", "no BatchNorm prior: the update shows no statistics of its batch"),
    ],
)
def test_it_says_which_statistics_its_prior_rests_on(which: str, uploads: str, words: str) -> None:
    assert words in notes(observed(uploads), which)


def test_statistics_that_are_granted_come_before_all_others() -> None:
    granted = {"bn1": (torch.zeros(8), torch.ones(8))}
    told = notes(observed("shared"), "auto", "E", statistics=granted)
    assert "BatchNorm prior: statistics of the batch, as granted" in told


def test_a_coefficient_that_is_given_wins_over_the_preset() -> None:
    assert DeepInversion().weight("tv") == 1e-4
    assert DeepInversion(preset="cpu").weight("tv") == 0.05
    assert DeepInversion(preset="cpu", tv=0.0).weight("tv") == 0.0
