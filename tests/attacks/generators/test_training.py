"""Training a generator: closer to its pictures, and going on where it was cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.attacks.generators import create_generator, generate
from fedsim.attacks.generators.training import Schedule, train_generator
from fedsim.core.attack import no_progress
from fedsim.core.errors import DataError
from fedsim.core.notebook import Notebook
from tests.attacks.generators.conftest import SMALL
from tests.staging import CPU, photos


def training(steps: int, path: Path | None = None, stop: int | None = None) -> nn.Module:
    """A small training on photos; ``stop`` interrupts it after so many steps."""
    images, _ = photos(16, list(range(24)))
    net = create_generator("dcgan", {"image_size": 16, **SMALL}, seed=0)

    def progress(done: int, total: int, loss: float | None = None) -> None:
        if stop is not None and done >= stop:
            raise KeyboardInterrupt

    train_generator(
        net,
        images,
        None,
        Schedule(steps=steps, batch_size=16, save_seconds=0.0),
        seed=0,
        device=CPU,
        progress=progress,
        notebook=Notebook(path) if path else None,
    )
    return net


def test_training_brings_the_generator_to_its_pictures() -> None:
    images, _ = photos(16, list(range(24)))
    fresh = create_generator("dcgan", {"image_size": 16, **SMALL}, seed=0)
    trained = training(300)
    z = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def distance(net: nn.Module) -> float:
        """Of a picture to the nearest of 64 samples, on average."""
        with torch.no_grad():
            made = generate(net, z)
        return float(torch.cdist(images.flatten(1), made.flatten(1)).min(1).values.mean())

    assert distance(trained) < 0.85 * distance(fresh)


def test_training_goes_on_from_where_it_was_cut(tmp_path: Path) -> None:
    whole = training(30)
    page = tmp_path / "page.safetensors"
    with pytest.raises(KeyboardInterrupt):
        training(30, page, stop=17)
    assert page.is_file()
    resumed = training(30, page)
    assert not page.exists()
    for one, two in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_too_few_pictures_are_refused() -> None:
    net = create_generator("dcgan", {"image_size": 16, **SMALL})
    with pytest.raises(DataError, match="at least 8 pictures"):
        train_generator(
            net,
            torch.rand(3, 3, 16, 16),
            None,
            Schedule(),
            seed=0,
            device=CPU,
            progress=no_progress,
        )
