"""Network of a generator: the latents it takes, and the images it makes of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsim.core.errors import ModelError

MOST_DOUBLINGS = 10  # from 4 pixels to 4096


def check_generator(generator: nn.Module, image_size: int) -> None:
    """Make one image and look at it: size, channels, range."""
    _check_size(getattr(generator, "image_size", image_size), image_size)
    latents = latents_of(generator, torch.zeros(1, latent_size(generator)))
    try:
        with torch.no_grad():
            images = decode(generator, latents, torch.zeros(1, dtype=torch.long))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise ModelError(f"the generator cannot make an image: {first}") from error
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ModelError(
            f"the generator makes images of shape {tuple(images.shape[1:])}; one or three channels "
            f"are needed."
        )
    for side in images.shape[-2:]:
        _check_size(side, image_size)
    if not 0 <= float(images.min()) <= float(images.max()) <= 1:
        raise ModelError("the generator's pixels must lie in [0, 1].")


def _check_size(side: int, image_size: int) -> None:
    if side != image_size:
        raise ModelError(
            f"the generator makes images of {side} pixels and the clients' have {image_size}."
        )


def latent_size(generator: nn.Module) -> int:
    """How many numbers z has."""
    return int(cast(Any, generator).latent_size)


def latents_of(generator: nn.Module, z: Tensor) -> Tensor:
    """Where in the searched space ``z`` lands."""
    mapping = getattr(generator, "latents", None)
    return mapping(z) if callable(mapping) else z


def takes_labels(generator: nn.Module) -> bool:
    return bool(getattr(generator, "num_classes", 0))


def decode(generator: nn.Module, latents: Tensor, labels: Tensor | None = None) -> Tensor:
    """Images as the generator makes them; one that is not conditional does not see labels."""
    made: Tensor = generator(latents, labels) if takes_labels(generator) else generator(latents)
    return made


def generate(generator: nn.Module, latents: Tensor, labels: Tensor | None = None) -> Tensor:
    """Images (B, 3, H, W) in [0, 1], grey ones as three equal channels."""
    images = decode(generator, latents, labels)
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images


def doublings_of(image_size: int) -> int:
    """How often 4 pixels double to ``image_size``."""
    count = image_size.bit_length() - 3
    if not 1 <= count <= MOST_DOUBLINGS or 4 << count != image_size:
        largest = 4 << MOST_DOUBLINGS
        raise ValueError(f"image_size must be a power of two from 8 to {largest}, not {image_size}")
    return count
