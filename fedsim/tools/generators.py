"""Generators from the command line: data in, a trained generator and a look at it out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedsim.attacks.generators import (
    check_generator,
    create_generator,
    generate,
    image_size_of,
    latent_size,
    latents_of,
    load_generator,
    save_generator,
    takes_labels,
)
from fedsim.attacks.generators.training import Schedule, train_generator
from fedsim.clients.data import known_as, load_images
from fedsim.core.attack import Progress, no_progress
from fedsim.core.device import resolve_device
from fedsim.core.errors import ModelError
from fedsim.core.notebook import Notebook
from fedsim.core.spec import DataSpec, GeneratorSpec


def train(
    output: Path,
    *,
    name: str,
    options: Mapping[str, Any],
    data: str,
    path: Path | None,
    image_size: int,
    steps: int,
    limit: int,
    seed: int,
    progress: Progress = no_progress,
) -> float:
    """Train and write a generator, with a grid of samples beside it; goes on where it stopped."""
    where = str(path.expanduser().absolute()) if path else None
    pictures = load_images(DataSpec(name=data, path=where, image_size=image_size), "train")
    built = {"image_size": image_size, **options}
    generator = create_generator(name, built, seed=seed)
    check_generator(generator, image_size)
    chosen = np.random.default_rng(seed).permutation(len(pictures))[:limit]
    images = torch.stack([pictures.image(int(row)) for row in chosen])
    labels = None
    if takes_labels(generator):
        labels = torch.tensor(pictures.labels[chosen])
        known = int(getattr(generator, "num_classes", 0) or 0)
        if int(labels.max()) >= known:
            raise ModelError(
                f"'{data}' has {int(labels.max()) + 1} classes and the generator {known}; give "
                f"num_classes as many."
            )

    def save(net: nn.Module, step: int) -> None:
        source = {"name": known_as(data), "path": where}
        save_generator(output, name, built, net, trained_on=source, steps=step)
        draw_grid(samples(net, 64, seed), output.with_suffix(".png"))

    return train_generator(
        generator,
        images,
        labels,
        Schedule(steps=steps),
        seed=seed,
        device=resolve_device("auto"),
        progress=progress,
        notebook=Notebook(output.with_suffix(".unfinished.safetensors")),
        on_save=save,
    )


def sample(file: Path, output: Path, *, count: int, seed: int, name: str | None = None) -> None:
    """A grid of images at random; ``name``: of a class that the file does not get to name."""
    spec = GeneratorSpec(checkpoint=str(file), name=name)
    net = load_generator(spec, image_size=image_size_of(file))
    draw_grid(samples(net, count, seed), output)


def samples(net: nn.Module, count: int, seed: int) -> Tensor:
    """Images (count, 3, H, W) of latents at random."""
    device = next(net.parameters()).device
    z = torch.randn(count, latent_size(net), generator=torch.Generator().manual_seed(seed))
    classes = int(getattr(net, "num_classes", 0) or 1)
    labels = torch.arange(count, device=device) % classes
    with torch.no_grad():
        return generate(net, latents_of(net, z.to(device)), labels).cpu()


def draw_grid(images: Tensor, path: Path) -> None:
    """Images as a grid, about square, in one PNG."""
    columns = max(1, int(len(images) ** 0.5))
    rows = -(-len(images) // columns)
    side = images.shape[-1]
    grid = torch.ones(rows * columns, 3, side, side)
    grid[: len(images)] = images
    pixels = grid.view(rows, columns, 3, side, side).permute(0, 3, 1, 4, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels.reshape(rows * side, -1, 3) * 255).round().byte().numpy()).save(path)
