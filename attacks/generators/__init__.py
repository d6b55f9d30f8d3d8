"""Generators: networks that make images from latents, trained ones and fresh ones.

A generator is an ``nn.Module`` with ``image_size``, ``channels`` (1 or 3), ``latent_size`` and

    latents(z)                 from z ~ N(0, 1), (B, latent_size), to the space that is searched
    forward(latents, labels)   to images (B, channels, H, W) in [0, 1]

Its file is a safetensors checkpoint that says in its metadata what it is and what it was trained
on. A class of one's own is named by its import path ``package.module:Class``; it may leave out
``latents`` (then z itself is searched), ``image_size`` and ``channels`` (then a trial tells).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsim.core.errors import DamagedError, ModelError, SpecError
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.registry import find
from fedsim.core.spec import GeneratorSpec

GENERATORS: dict[str, str] = {
    "dcgan": "fedsim.attacks.generators.dcgan:Dcgan",
    "stylegan": "fedsim.attacks.generators.stylegan:StyleGan",
}


def create_generator(name: str, options: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """A fresh generator in eval mode; the same seed gives the same weights."""
    try:
        made = find("generator", GENERATORS, name)
    except SpecError as error:
        raise ModelError(str(error)) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            generator = made(**options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"the generator '{name}' does not take its options: {error}."
            ) from None
    if not isinstance(generator, nn.Module) or not hasattr(generator, "latent_size"):
        raise ModelError(f"the generator '{name}' must be a torch module with a latent_size.")
    return generator.eval()


def save_generator(
    path: Path, name: str, options: Mapping[str, Any], generator: nn.Module, **about: Any
) -> None:
    """Weights and, in the metadata, how to build it and ``about`` its training."""
    metadata = {"generator": json.dumps({"name": name, "options": dict(options), **about})}
    save_tensors(path, generator.state_dict(), metadata)


def generator_metadata(path: Path) -> dict[str, Any]:
    """What a generator's file says of itself; {} for a bare state dict."""
    return _read(path)[1]


def load_generator(spec: GeneratorSpec, *, image_size: int) -> nn.Module:
    """The trained generator of ``spec``, frozen, whose images must be of ``image_size``."""
    path = Path(spec.checkpoint)
    tensors, about = _read(path)
    name = spec.name or about.get("name")
    if name is None:
        raise ModelError(
            f"'{path}' does not say which generator it is; give its name, or the import path of "
            f"its class."
        )
    if spec.name and about.get("name") not in (None, spec.name):
        raise ModelError(f"'{path}' holds a {about['name']}, not a {spec.name}.")
    generator = create_generator(name, {**about.get("options", {}), **spec.options})
    own = generator.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys()) or [
        key for key in own if own[key].shape != tensors[key].shape
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint '{path}' does not fit the generator {name}: '{wrong[0]}' differs."
        )
    generator.load_state_dict(tensors)
    check_generator(generator, image_size)
    return generator.requires_grad_(False)


def check_generator(generator: nn.Module, image_size: int) -> None:
    """Make one image and look at it: size, channels, range."""
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
    if images.shape[-2:] != (image_size, image_size):
        raise ModelError(
            f"the generator makes images of {images.shape[-1]} pixels and the clients' have "
            f"{image_size}."
        )
    if float(images.min()) < 0 or float(images.max()) > 1:
        raise ModelError("the generator's pixels must lie in [0, 1].")


def doublings_of(image_size: int) -> int:
    """How often 4 pixels double to ``image_size``."""
    count = image_size.bit_length() - 3
    if count < 1 or 4 << count != image_size:
        raise ValueError(f"image_size must be a power of two from 8 on, not {image_size}")
    return count


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


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors, metadata = read_tensors(path)
        return tensors, json.loads(metadata.get("generator", "{}"))
    except FileNotFoundError:
        raise ModelError(f"there is no generator file '{path}'.") from None
    except (DamagedError, ValueError) as error:
        raise ModelError(
            f"'{path}' is no generator file: not a safetensors checkpoint ({type(error).__name__})."
        ) from error
