"""Checkpoints: a generator made afresh, kept in a file that says what it is, and read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacks.generators.network import check_generator
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
        factory = find("generator", GENERATORS, name)
    except SpecError as error:
        raise ModelError(str(error)) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            generator = factory(**options)
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
    expected = generator.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys()) or [
        key for key in expected if expected[key].shape != tensors[key].shape
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint '{path}' does not fit the generator {name}: '{wrong[0]}' differs."
        )
    generator.load_state_dict(tensors)
    check_generator(generator, image_size)
    return generator.requires_grad_(False)


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
