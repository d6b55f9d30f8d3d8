"""Passes: what a witness keeps in the vault of its client, one file for every way through a loader.

A picture that comes again is kept once: a pass names the pictures of its batches by numbers that
count through all passes of one witness. Those on the 8-bit grid of stored pictures, where all are
that came to be normalised, are kept as they were before that, a byte per number; others as they
came. Nothing in a file says which round it is of: the client does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedsim.core.errors import DamagedError, FedsimError
from fedsim.core.files import tensors_from_bytes, tensors_to_bytes
from fedsim.core.run.paths import PASSES
from fedsim.core.vault import Vault

LEVELS = 255
NO_PASS = 0  # the number under which a witness says that it is there; those of passes count from 1
_ON_GRID = 2e-3  # levels: float32 normalised and back is off by less


class About(BaseModel):
    """A pass; times are the client's clock."""

    source: str  # one witness in one process
    loader: str  # that it was given
    number: int  # of the pass
    run_id: int
    node_id: int
    partition: int | None = None
    host: str
    began: float
    ended: float
    exhausted: bool  # whether it went to the end; otherwise its last batch may not have been used
    learned: bool = True  # False where gradients were off whenever a batch was fetched
    rows: list[list[int]] = []
    stored: list[int] = []  # the numbers of the pictures in this file that are on the grid
    loose: list[int] = []  # and of those that are not
    mean: list[float] | None = None  # that pictures on the grid were normalised by
    std: list[float] | None = None
    lost: str | None = None  # why its batches are not here


@dataclass(frozen=True)
class Pass:
    """A pass as it was kept: pictures on the grid (G, C, H, W) of bytes, and others as they were
    yielded; labels of both, in this order."""

    about: About
    stored: Tensor
    loose: Tensor
    labels: Tensor

    def write(self, vault: Vault) -> None:
        tensors = {"stored": self.stored, "loose": self.loose, "labels": self.labels}
        metadata = {"about": self.about.model_dump_json()}
        number = self.about.number or 1  # what only says that a witness is there makes way
        name = f"{PASSES}/{self.about.source}-{number:05d}.safetensors"
        vault.keep(name, tensors_to_bytes(tensors, metadata))


def read_pass(vault: Vault, path: Path) -> Pass:
    """A pass in a vault; damage is an error."""
    tensors, metadata = tensors_from_bytes(vault.content(f"{PASSES}/{path.name}"), path)
    try:
        about = About.model_validate(json.loads(metadata["about"]))
        return Pass(about, tensors["stored"], tensors["loose"], tensors["labels"])
    except (KeyError, ValueError, ValidationError) as error:
        raise DamagedError(f"'{path}' is damaged ({type(error).__name__}).") from error


def list_passes(folder: Path) -> Iterator[Path]:
    """Every pass in the vaults in a folder, however deep."""
    yield from sorted(folder.glob(f"**/{PASSES}/[!.]*.safetensors"))


def read_passes(folders: list[Path], run_id: int | None) -> tuple[list[Pass], list[str]]:
    """The passes of one of Flower's runs in these folders, and what is wrong with others; of a
    witness that kept none, that it is there."""
    found, wrong = [], []
    for path in (path for folder in folders for path in list_passes(folder)):
        root = path.parent.parent
        beside = [root.parent / "vault-keys", root / "vault-keys"]
        try:
            one = read_pass(Vault(root, folders=[*_own_keys(), *beside]), path)
        except (FedsimError, OSError) as error:
            wrong.append(str(error))
            continue
        if run_id is None or one.about.run_id == run_id:
            found.append(one)
    spoke = {one.about.source for one in found if one.about.number != NO_PASS}
    return [p for p in found if p.about.number != NO_PASS or p.about.source not in spoke], wrong


def _own_keys() -> tuple[Path, ...]:
    from fedsim.core.keyring import key_folders

    return key_folders()


def on_grid(images: Tensor, mean: list[float], std: list[float]) -> Tensor | None:
    """The bytes (B, C, H, W) that these pictures were before they were normalised; None where they
    are not all on that grid."""
    if images.dtype == torch.uint8:
        return None
    shape = (1, -1, 1, 1)
    levels = (images.double() * torch.tensor(std).double().view(shape)) + torch.tensor(
        mean
    ).double().view(shape)
    levels = levels * LEVELS
    rounded = levels.round()
    if bool((levels - rounded).abs().max() > _ON_GRID):
        return None
    if bool(rounded.min() < 0) or bool(rounded.max() > LEVELS):
        return None
    return rounded.to(torch.uint8)


def as_pictures(images: Tensor, mean: Any, std: Any) -> Tensor:
    """Pictures as they were yielded, in [0, 1]: (B, C, H, W); those that were never normalised, in
    bytes, by their levels."""
    if images.dtype == torch.uint8:
        return images.float() / LEVELS
    shape = (1, -1, 1, 1)
    return images.float() * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
