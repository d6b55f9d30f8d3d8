"""Stand-ins for modules: they compute the same."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedsim.attacks.matching.smooth_modules import as_matrix, tape_kinks
from fedsim.core.spec import ModelSpec
from tests.attacks.matching.conftest import VIT, model_of, pictures


def test_kinks_are_held_between_the_two_passes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    plain, taped = copy.deepcopy(net), copy.deepcopy(net)
    tape = tape_kinks(taped)
    images = pictures(2, 0, 8)
    tape.record()
    assert torch.equal(taped(images), plain(images))
    choices = tape.choices
    tape.replay(choices)
    assert torch.allclose(taped(images), plain(images))

    def held(scale: float) -> torch.Tensor:
        tape.replay(choices)
        return taped(scale * images)

    # With the choices held the network is affine: equal steps in, equal steps out.
    assert torch.allclose(held(3) - held(2), held(2) - held(1), atol=1e-4)
    assert not torch.allclose(plain(-3 * images), held(-3), atol=1e-4)


def test_a_patch_projection_is_a_matrix_product() -> None:
    model = model_of(VIT).eval()
    images = pictures(2, 0)
    before, names = model(images), [n for n, _ in model.named_parameters()]
    as_matrix(model)
    assert torch.allclose(model(images), before, atol=1e-5)
    assert [n for n, _ in model.named_parameters()] == names


def test_a_projection_of_somebodys_own_keeps_its_place_and_what_it_is_asked() -> None:
    model = model_of(ModelSpec(name="tests.tutorials:HandWrittenViT")).eval()
    images = pictures(2, 0)
    before = model(images)
    as_matrix(model)
    assert type(model.stem[0]) is not nn.Conv2d
    assert model.stem[0].kernel_size == (8, 8)
    assert torch.allclose(model(images), before, atol=1e-5)
