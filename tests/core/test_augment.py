"""Augmentation: torchvision's transforms by name, drawn by a seed, checked before a round runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim.core.augment import Augmentation, check_augmentation, mixes
from fedsim.core.errors import SpecError

SIDE = 16
PICTURES = torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
USUAL = [
    {"name": "RandomResizedCrop", "scale": [0.5, 1]},
    {"name": "RandomHorizontalFlip"},
    {"name": "ColorJitter", "brightness": 0.4, "hue": 0.1},
    {"name": "RandAugment"},
]
MIX = [{"name": "MixUp"}, {"name": "CutMix", "alpha": 1.0}]


def test_the_same_seed_draws_the_same_views_and_another_one_others() -> None:
    augmentation = Augmentation.of(USUAL, SIDE)
    first, again, other = (augmentation(PICTURES, seed).images for seed in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == PICTURES.shape
    assert 0 <= float(first.min()) <= float(first.max()) <= 1


def test_each_picture_has_a_coin_of_its_own() -> None:
    views = Augmentation.of([USUAL[0]], SIDE)(PICTURES[:1].expand(2, -1, -1, -1), "a").images
    assert not torch.equal(views[0], views[1])


def test_drawing_leaves_the_coins_of_others_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Augmentation.of([*USUAL, *MIX], SIDE)(PICTURES, "a")
    assert torch.equal(torch.rand(1), expected)


def test_mixup_says_of_which_pictures_each_is_mixed() -> None:
    seen = Augmentation.of(MIX[:1], SIDE)(PICTURES, "a")
    assert seen.mixing is not None
    torch.testing.assert_close(seen.mixing.sum(1), torch.ones(4))
    blended = torch.einsum("ij,jchw->ichw", seen.mixing, PICTURES)
    torch.testing.assert_close(seen.images, blended)


def test_mixers_one_after_the_other_and_one_of_several_add_up() -> None:
    both = Augmentation.of(MIX, SIDE)(PICTURES, "a")
    assert both.mixing is not None
    torch.testing.assert_close(both.mixing.sum(1), torch.ones(4))
    either = Augmentation.of([{"name": "RandomChoice", "transforms": MIX}], SIDE)(PICTURES, "a")
    assert either.mixing is not None
    assert int((either.mixing > 0).sum(1).max()) <= 2
    assert mixes([*USUAL, {"name": "RandomChoice", "transforms": MIX}])
    assert not mixes(USUAL)


@pytest.mark.parametrize(
    ("component", "words"),
    [
        ({"name": "RandomResizedCorp"}, r"no transform 'RandomResizedCorp'.*RandomResizedCrop"),
        ({"name": "RandomResizedCrop", "scal": [0.5, 1]}, r"no parameter 'scal'.*'scale'"),
        ({"name": "ColorJitter", "brightness": -1}, "ColorJitter does not take its parameters"),
        ({"name": "AutoAugment", "policy": "cifar"}, r"no policy 'cifar'.*cifar10"),
        ({"name": "Normalize", "mean": 0.5}, r"Normalize does not belong here: data\.mean"),
        ({"name": "Resize", "size": 8}, r"Resize makes \(3, 8, 8\) of a picture of \(3, 16, 16\)"),
        ({"name": "ToPILImage"}, "ToPILImage makes Image of a picture"),
        ({"name": "MixUp", "num_classes": 3}, r"MixUp has no parameter 'num_classes'"),
        ({"name": "RandomZoomOut"}, "RandomZoomOut makes"),  # every second time
        (
            {"name": "RandomApply", "p": 0.2, "transforms": [{"name": "Resize", "size": 8}]},
            r"RandomApply makes \(3, 8, 8\)",
        ),
        (
            {"name": "RandomApply", "p": 0.2, "transforms": ["GaussianNoise", 7]},
            "no transform '7'",
        ),
        ({"name": "MixUp", "alpha": 0.0}, "MixUp does not take its parameters"),
    ],
)
def test_a_transform_that_cannot_be_applied_is_refused_in_a_sentence(
    component: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words) as error:
        check_augmentation([component], SIDE)
    assert "\n" not in str(error.value)


def test_what_mixes_a_batch_comes_last() -> None:
    with pytest.raises(SpecError, match="RandAugment acts on single pictures; list it before"):
        check_augmentation([*MIX, USUAL[3]], SIDE)
    with pytest.raises(SpecError, match="choose among one kind"):
        check_augmentation([{"name": "RandomChoice", "transforms": [*MIX, USUAL[3]]}], SIDE)
    check_augmentation([*USUAL, *MIX], SIDE)


def test_a_transform_inside_another_may_be_its_name_alone() -> None:
    choice = [{"name": "RandomChoice", "transforms": ["RandomHorizontalFlip", "RandAugment"]}]
    check_augmentation(choice, SIDE)
    assert not mixes(choice)
    assert mixes([{"name": "RandomChoice", "transforms": ["MixUp", "CutMix"]}])


def test_a_view_of_another_size_than_its_picture_is_told_whenever_it_comes() -> None:
    seldom = [{"name": "RandomApply", "p": 0.5, "transforms": [{"name": "Resize", "size": 8}]}]
    augmentation = Augmentation.of(seldom, SIDE)
    with pytest.raises(SpecError, match=r"makes \(3, 8, 8\) of a picture of \(3, 16, 16\)"):
        _ = [augmentation(PICTURES[:1], str(seed)) for seed in range(20)]
