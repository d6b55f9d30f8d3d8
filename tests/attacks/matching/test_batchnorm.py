"""BatchNorm as a prior: of the batch where its statistics can be had, and it says of which."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.core.knowledge import THREATS, Announced, Secrets, View
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, TrainSpec, Upload
from tests.staging import CPU, observe, photos

RESNET = ModelSpec(
    name="resnet18",
    options={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8},
)


def notes(train: TrainSpec, which: str, threat: str = "C", statistics=None) -> list[str]:
    images, labels = photos(32, [70, 20])
    view = View(
        observe(RESNET, images, labels, train),
        THREATS[threat].grants,
        Announced(lambda: build_model(RESNET, image_size=32, num_classes=8, seed=0)),
        secrets=Secrets(statistics=statistics),
    )
    attack = create_attack("grad_inversion", batchnorm=which, engine="first_order", seeds=1)
    return attack.task(view, CPU).problem.notes


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
    assert words in notes(TrainSpec(batch_size=2, batchnorm=uploads), which)  # type: ignore[arg-type]


def test_statistics_that_are_granted_come_before_all_others() -> None:
    granted = {"bn1": (torch.zeros(8), torch.ones(8))}
    told = notes(TrainSpec(batch_size=2, batchnorm="shared"), "auto", "E", statistics=granted)
    assert "BatchNorm prior: statistics of the batch, as granted" in told


def test_several_local_steps_are_matched_without_batchnorm_and_it_says_so() -> None:
    train = TrainSpec(batch_size=2, local_steps=2, upload=Upload.DELTA, batchnorm="shared")
    told = notes(train, "auto")
    assert any("no BatchNorm prior: the client takes several steps" in note for note in told)


def test_a_client_that_clips_costs_no_prior_where_the_cost_is_scale_free() -> None:
    train = TrainSpec(batch_size=2, batchnorm="shared", clip=5.0)
    told = notes(train, "auto")
    assert "BatchNorm prior: statistics of the batch, from the uploaded buffers" in told
    assert not any("several steps" in note for note in told)


def test_pictures_that_match_no_gradient_keep_the_prior_whatever_the_client_does() -> None:
    images, labels = photos(32, [70, 20, 30, 40])
    train = TrainSpec(batch_size=2, upload=Upload.DELTA, local_steps=2, lr=0.01)
    view = View(
        observe(RESNET, images, labels, train),
        THREATS["C"].grants,
        Announced(lambda: build_model(RESNET, image_size=32, num_classes=8, seed=0)),
    )
    told = create_attack("deep_inversion").task(view, CPU).problem.notes
    assert "BatchNorm prior: the model's running statistics" in told
