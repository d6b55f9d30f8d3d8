"""Generators from the command line: trained, sampled, drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from fedsim.attacks.generators import create_generator, generator_metadata, save_generator
from fedsim.core.errors import ModelError
from fedsim.tools.generators import draw_grid, sample, samples, train

SMALL = {"image_size": 16, "latent_size": 8, "width": 4}


def test_a_grid_is_about_square_and_its_rest_is_white(tmp_path: Path) -> None:
    draw_grid(torch.zeros(5, 3, 4, 4), tmp_path / "below" / "grid.png")
    with Image.open(tmp_path / "below" / "grid.png") as grid:
        assert grid.size == (2 * 4, 3 * 4)
        assert grid.getpixel((0, 0)) == (0, 0, 0)
        assert grid.getpixel((7, 11)) == (255, 255, 255)


def test_the_seed_gives_the_same_samples() -> None:
    net = create_generator("dcgan", SMALL)
    first, same, other = (samples(net, 3, seed) for seed in (1, 1, 2))
    assert first.shape == (3, 3, 16, 16)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_samples_of_a_conditional_generator_go_through_its_classes() -> None:
    net = create_generator("dcgan", {**SMALL, "num_classes": 2}).eval()
    with torch.no_grad():
        net.embed.weight[0], net.embed.weight[1] = 0.0, 100.0
    made = samples(net, 4, 0)
    assert (made[0] - made[2]).abs().mean() < (made[0] - made[1]).abs().mean()


def test_a_sample_is_drawn_at_the_size_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    save_generator(file, "dcgan", SMALL, create_generator("dcgan", SMALL))
    sample(file, tmp_path / "look.png", count=4, seed=0)
    with Image.open(tmp_path / "look.png") as picture:
        assert picture.size == (32, 32)


def options(**more: object) -> dict:
    named = {"name": "dcgan", "data": "photos", "path": None, "image_size": 16}
    return {**named, "steps": 2, "limit": 16, "seed": 0, **more}


def test_training_says_what_it_was_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    error = train(file, **options(options={"width": 4}))
    assert error > 0
    assert generator_metadata(file)["trained_on"] == {"name": "photos", "path": None}
    assert file.with_suffix(".png").is_file()


def test_more_classes_than_the_generator_has_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'photos' has 8 classes and the generator 2"):
        train(tmp_path / "g", **options(options={"width": 4, "num_classes": 2}, limit=512))


class Half(nn.Module):
    """Somebody's own generator: grey, all of it."""

    latent_size = 2

    def __init__(self, image_size: int = 16):
        super().__init__()
        self.side, self.level = image_size, nn.Parameter(torch.tensor(0.5))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.level.expand(len(z), 3, self.side, self.side).clone()


def test_a_class_of_ones_own_is_sampled_by_its_name_alone(tmp_path: Path) -> None:
    file, own = tmp_path / "g.safetensors", f"{__name__}:Half"
    save_generator(file, own, {"image_size": 16}, Half())
    with pytest.raises(ModelError, match="none of ours"):
        sample(file, tmp_path / "look.png", count=4, seed=0)
    sample(file, tmp_path / "look.png", count=4, seed=0, name=own)
    with Image.open(tmp_path / "look.png") as picture:
        assert picture.size == (32, 32)


def test_a_file_with_a_size_that_is_none_is_told(tmp_path: Path) -> None:
    net = create_generator("dcgan", SMALL)
    save_generator(tmp_path / "g", "dcgan", {"image_size": "large"}, net)
    with pytest.raises(ModelError, match="its images have 'large' pixels"):
        sample(tmp_path / "g", tmp_path / "look.png", count=4, seed=0)
