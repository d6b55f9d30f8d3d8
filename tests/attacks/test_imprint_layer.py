"""The imprint layer, decoded: pictures alone in their bins, before any model."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.manoeuvres.imprint_layer import ImprintLayer
from fedsim.core.errors import AttackError
from fedsim.core.metrics import psnr
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.imprinted import MODEL, SIDE, VICTIMS, decoded, played
from tests.staging import photos


def binned(spec: ModelSpec = MODEL, bins: int = 256) -> ModelSpec:
    return ModelSpec(name=spec.name, options={**spec.options, "imprint_layer": bins})


@pytest.mark.parametrize("spec", [MODEL, ModelSpec(name="resnet18")])
def test_pictures_alone_in_their_bins_are_read_before_any_model(spec: ModelSpec) -> None:
    images, labels = photos(SIDE, VICTIMS)
    found = decoded(played(ImprintLayer(), images, labels, model=binned(spec)), "imprint_layer")
    assert len(found.images) <= len(images)
    scores = [float(psnr(image.expand_as(found.images), found.images).max()) for image in images]
    assert sum(score > 40 for score in scores) >= 3
    assert any("hold something" in note for note in found.notes)


def test_a_local_step_is_read_like_a_gradient() -> None:
    images, labels = photos(SIDE, VICTIMS)
    train = TrainSpec(batch_size=4, upload="delta", local_steps=1, lr=0.05)
    found = decoded(
        played(ImprintLayer(), images, labels, model=binned(), train=train), "imprint_layer"
    )
    scores = [float(psnr(image.expand_as(found.images), found.images).max()) for image in images]
    assert max(scores) > 25


def test_a_model_without_the_layer_is_declined() -> None:
    from fedsim.attacks.manoeuvres.imprint import ImprintWeights

    view = played(ImprintWeights(), photos(SIDE, VICTIMS)[0])
    with pytest.raises(AttackError, match="imprint_layer"):
        decoded(view, "imprint_layer")


def test_a_gradient_of_zeros_is_declined() -> None:
    view = played(ImprintLayer(), photos(SIDE, VICTIMS)[0], model=binned(bins=8))
    for tensor in view.update.tensors.values():
        tensor.copy_(torch.zeros_like(tensor))
    with pytest.raises(AttackError, match="gradient is zero"):
        decoded(view, "imprint_layer")
