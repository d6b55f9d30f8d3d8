"""What stands around every closed form: patches folded, parts uploaded or told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedsim.attacks.closed.frame import ClosedForm, Solved, fold_patches, uploaded
from fedsim.core.anatomy import vit_parts
from fedsim.core.attack import Progress, no_progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from tests.staging import CPU, TINY, observe, photos


def test_folding_patches_undoes_what_the_convolution_sees() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    parts = vit_parts(model)
    images, _ = photos(32, [9])
    patches = torch.nn.functional.unfold(images, 8, stride=8)[0].T
    assert torch.equal(fold_patches(patches, parts), images[0])


def test_a_part_that_was_not_uploaded_is_named() -> None:
    with pytest.raises(AttackError, match="mine needs the gradient of b and c, which the client"):
        uploaded({"a": torch.ones(2)}, ["a", "b", "c"], "mine")
    with pytest.raises(AttackError, match="not finite"):
        uploaded({"a": torch.tensor([1.0, float("inf")])}, ["a"], "mine")
    (found,) = uploaded({"a": torch.ones(2), "b": torch.ones(2)}, ["a"], "mine")
    assert found.dtype == torch.float64


@dataclass(frozen=True)
class Grey(ClosedForm):
    """Solves nothing: the normalised middle."""

    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        return Solved(torch.zeros(3, 32, 32, dtype=torch.float64), loss=0.25)


def test_a_solved_picture_is_brought_back_to_pixels_once_for_each_of_the_batch() -> None:
    images, labels = photos(32, [9, 70])
    observation = observe(TINY, images, labels)
    view = View(
        observation,
        THREATS["B"].grants,
        Announced(lambda: build_model(TINY, image_size=32, num_classes=8, seed=0)),
    )
    found = Grey().reconstruct(view, device=CPU, progress=no_progress)
    assert torch.equal(found.images, torch.full((2, 3, 32, 32), 0.5))  # the mean, unnormalised
    assert found.loss == 0.25
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


def test_patches_that_are_read_in_another_order_are_put_back() -> None:
    spec = ModelSpec(name="tests.tutorials:TutorialViT")
    parts = vit_parts(build_model(spec, image_size=32, num_classes=8, seed=0))
    images, _ = photos(32, [9])
    read = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(16, -1)
    assert torch.equal(fold_patches(read, parts), images[0])
