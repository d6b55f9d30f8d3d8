"""Checkpoints: a generator made afresh, kept in a file that says what it is, and read again.

A file may come from anybody, so it may name a generator of ours and nothing else: a class by its
import path is imported where the spec names it, never because a file does.
"""

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
from fedsim.core.registry import find, is_registered
from fedsim.core.spec import GeneratorSpec

GENERATORS: dict[str, str] = {
    "dcgan": "fedsim.attacks.generators.dcgan:Dcgan",
    "stylegan": "fedsim.attacks.generators.stylegan:StyleGan",
}
_USUAL_SIZE = 32  # of images, where a file does not say


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
        except Exception as error:  # somebody's own class, or options out of a file
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


def image_size_of(path: Path) -> int:
    """The side of the images that a generator's file makes, as it says."""
    size = generator_metadata(path).get("options", {}).get("image_size", _USUAL_SIZE)
    if not isinstance(size, int):
        raise ModelError(f"'{path}' says that its images have {size!r:.20} pixels; get it anew.")
    return size


def load_generator(spec: GeneratorSpec, *, image_size: int) -> nn.Module:
    """The trained generator of ``spec``, frozen, whose images must be of ``image_size``."""
    path = Path(spec.checkpoint)
    tensors, about = _read(path)
    name = _name(spec, about.get("name"))
    options = {**about.get("options", {}), **spec.options}
    if is_registered(GENERATORS, name):
        # Without numbers first: options in a file must not ask for more room than its tensors do.
        with torch.device("meta"):
            _check_fit(create_generator(name, options), tensors, path, name)
    generator = create_generator(name, options)
    _check_fit(generator, tensors, path, name)
    try:
        generator.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"the checkpoint '{path}' does not fit the generator {name}.") from error
    check_generator(generator, image_size)
    return generator.requires_grad_(False)


def _name(spec: GeneratorSpec, told: str | None) -> str:
    """Which generator a file holds: by the spec's word, or by the file's if it is one of ours."""
    if spec.name and told not in (None, spec.name):
        raise ModelError(f"'{spec.checkpoint}' holds a {told}, not a {spec.name}.")
    if spec.name or (told and is_registered(GENERATORS, told)):
        return spec.name or str(told)
    if told is None:
        raise ModelError(
            f"'{spec.checkpoint}' does not say which generator it is; give its name, or the import "
            f"path of its class."
        )
    raise ModelError(
        f"'{spec.checkpoint}' says that it holds a {told}, which is none of ours "
        f"({', '.join(GENERATORS)}), and a file is not believed in that; if the class is yours, "
        f"name it yourself: threat.generator.name={told}."
    )


def _check_fit(generator: nn.Module, tensors: Mapping[str, Tensor], path: Path, name: str) -> None:
    expected = generator.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys()) or [
        key for key in expected if expected[key].shape != tensors[key].shape
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint '{path}' does not fit the generator {name}: '{wrong[0]}' differs."
        )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors, metadata = read_tensors(path, links=True)
        about = json.loads(metadata.get("generator", "{}"))
    except FileNotFoundError:
        raise ModelError(f"there is no generator file '{path}'.") from None
    except (DamagedError, ValueError, RecursionError) as error:
        raise ModelError(
            f"'{path}' is no generator file: not a safetensors checkpoint ({type(error).__name__})."
        ) from error
    if not (
        isinstance(about, dict)
        and isinstance(about.get("name"), str | None)
        and isinstance(about.get("options", {}), dict)
    ):
        raise ModelError(f"'{path}' is no generator file: what it says of itself is damaged.")
    return tensors, about
