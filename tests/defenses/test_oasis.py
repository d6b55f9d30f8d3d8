"""OASIS: what joins a picture, and what a server makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fedsim.core.learning import Trail, local_update
from fedsim.defenses.oasis import Oasis, joined, warped
from tests.defenses.conftest import MODELS, Defended, assert_canary_holds, secret

EVERY = ["major_rotation", "minor_rotation", "shear", "horizontal_flip", "vertical_flip"]


def test_a_batch_is_joined_by_its_copies_with_their_labels(vit) -> None:
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([3, 1])
    shown, targets = Oasis().protect_batch(images, labels, vit, secret())
    assert len(shown) == 8
    assert torch.equal(shown[:2], images)
    assert torch.equal(shown[2:4], images.rot90(1, (-2, -1)))
    assert targets.tolist() == [3, 1] * 4
    mixtures = torch.eye(5)[labels]
    assert torch.equal(
        Oasis().protect_batch(images, mixtures, vit, secret())[1], torch.eye(5)[targets]
    )
    alone, _ = Oasis(originals=False).protect_batch(images, labels, vit, secret())
    assert torch.equal(alone, shown[2:])


def test_turned_by_right_angles_a_picture_keeps_its_brightness() -> None:
    images = torch.rand(2, 3, 8, 8)
    means = joined(images, ["major_rotation"]).mean((1, 2, 3)).view(4, 2)
    assert torch.allclose(means, means[:1].expand(4, 2), atol=1e-6)


def test_pictures_are_read_between_pixels_as_torch_reads_them() -> None:
    images = torch.rand(2, 3, 9, 9)
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    theta = torch.cat([turn.flip(0, 1), torch.zeros(2, 1)], 1)[None].expand(2, 2, 3)
    grid = F.affine_grid(theta, [2, 3, 9, 9], align_corners=True)
    wanted = F.grid_sample(images, grid, padding_mode="border", align_corners=True)
    assert torch.allclose(warped(images, ((0.6, -0.8), (0.8, 0.6))), wanted, atol=1e-5)


@pytest.mark.parametrize("transform", EVERY)
def test_of_normalised_pictures_copies_are_the_normalised_copies(transform) -> None:
    images = torch.rand(1, 3, 8, 8)
    scaled = joined((images - 0.4) / 0.2, [transform])
    assert torch.allclose(scaled, (joined(images, [transform]) - 0.4) / 0.2, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_the_mean_over_all_copies_and_one_picture_is_counted(model: str) -> None:
    stage, trail = Defended("oasis", {}, MODELS[model], rows=(70, 20)), Trail()
    update = stage.uploaded(trail=trail)
    images, labels = stage.batch
    whole = (joined(images, ["major_rotation"]), labels.repeat(4))
    plain = local_update(stage.net, [whole], stage.public.protocol)
    assert all(torch.equal(t, plain.tensors[n]) for n, t in update.tensors.items())
    assert (update.num_examples, plain.num_examples) == (2, 8)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("Oasis", "batch")]


@pytest.mark.parametrize("engine", ["double", "first_order"])
@pytest.mark.parametrize("transforms", [["major_rotation"], EVERY])
def test_a_server_simulates_the_same_copies(engine: str, transforms: list[str]) -> None:
    stage = Defended("oasis", {"transforms": transforms}, rows=(70, 20))
    knows = stage.matching_loss(adaptive=True, engine=engine)
    assert knows < 1e-5
    assert stage.matching_loss(adaptive=False, engine=engine) > 100 * knows + 1e-3


def test_the_canary_holds(tmp_path: Path) -> None:
    assert_canary_holds(tmp_path, "{name: oasis}")


def test_a_closed_form_reads_a_blend() -> None:
    assert Defended("oasis", {}).solved() < 30
