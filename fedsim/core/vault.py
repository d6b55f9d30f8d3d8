"""Vault: the truth. Written by the client side, read by the testbed, never by an attack.

Images, labels and the client's seeds, in a directory that only its owner can enter. Scoring reads
it, and so does whoever grants an attack a part of the truth. No module under ``attacks/`` imports
this one, and in the thread of a running attack (`sealed`) the vault does not open.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedsim.core.errors import DamagedError, NotGranted, VaultError
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.knowledge import is_sealed
from fedsim.core.learning import Batch
from fedsim.core.run import observation_name, state_path, truth_path


@dataclass(frozen=True)
class Truth:
    """What a client learned from in one round.

    ``images`` (M, 3, H, W) in [0, 1] and ``labels`` (M,) are the distinct samples; ``batches``
    lists, step by step, which of them were used.
    """

    images: Tensor
    labels: Tensor
    batches: list[list[int]]
    defense_seed: int
    trail: list[dict[str, str]]  # what each defense changed, as digests
    stateful: bool = False  # whether the client kept a state of its own

    def replay(self) -> list[Batch]:
        """The batches as the client saw them."""
        return [(self.images[rows], self.labels[rows]) for rows in self.batches]


class Vault:
    """The truths of a run, and the private state of its clients."""

    def __init__(self, root: Path):
        self.root = root

    def write(
        self, round_: int, client: int, truth: Truth, state: Mapping[str, Tensor] | None = None
    ) -> None:
        """Keep a client's truth, and its own state after the round: BatchNorm statistics it does
        not share, and what its defenses keep back."""
        about = {
            "batches": truth.batches,
            "defense_seed": truth.defense_seed,
            "trail": truth.trail,
            "stateful": bool(state),
        }
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)
            if state:
                save_tensors(state_path(self.root, round_, client), state, mode=0o600)
            save_tensors(
                truth_path(self.root, round_, client),
                {"images": truth.images, "labels": truth.labels},
                {"about": json.dumps(about)},
                mode=0o600,
            )
        except OSError as error:
            raise VaultError(f"the vault cannot be written: {error.strerror}.") from error

    def read(self, round_: int, client: int) -> Truth:
        if is_sealed():
            raise NotGranted("an attack tried to open the vault.")
        path = truth_path(self.root, round_, client)
        try:
            tensors, metadata = read_tensors(path)
            about = _About.model_validate_json(metadata["about"])
            images, labels = tensors["images"], tensors["labels"]
        except FileNotFoundError:
            raise VaultError(
                f"the vault has no truth for {observation_name(round_, client)}."
            ) from None
        except (DamagedError, KeyError, ValidationError) as error:
            raise VaultError(self._damaged(path, type(error).__name__)) from error
        if not _fits(images, labels, about):
            raise VaultError(self._damaged(path, "its batches do not fit its images"))
        return Truth(images, labels, about.batches, about.defense_seed, about.trail, about.stateful)

    def read_state(self, before_round: int, client: int) -> dict[str, Tensor]:
        """The client's newest state from before a round; empty at its first."""
        if is_sealed():
            raise NotGranted("an attack tried to open the vault.")
        for round_ in range(before_round - 1, 0, -1):
            path = state_path(self.root, round_, client)
            if path.is_file():
                try:
                    return read_tensors(path)[0]
                except DamagedError as error:
                    raise VaultError(self._damaged(path, type(error).__name__)) from error
        return {}

    def check(self, round_: int, client: int) -> None:
        """Raise where what a client left in a round is missing or damaged."""
        if self.read(round_, client).stateful:
            path = state_path(self.root, round_, client)
            if not path.is_file():
                raise VaultError(f"the vault's '{path}' is missing.")
            self.read_state(round_ + 1, client)

    @staticmethod
    def _damaged(path: Path, how: str) -> str:
        return (
            f"the vault's '{path}' is damaged ({how}); go on with `fedsim audit --resume` and its "
            f"round is done again."
        )


class _About(BaseModel):
    """What a file says beside images and labels."""

    batches: list[list[int]]
    defense_seed: int
    trail: list[dict[str, str]]
    stateful: bool = False


def _fits(images: Tensor, labels: Tensor, about: _About) -> bool:
    rows = [row for batch in about.batches for row in batch]
    return (
        images.ndim == 4
        and images.is_floating_point()
        and labels.dtype == torch.long
        and labels.shape == images.shape[:1]
        and all(0 <= row < len(images) for row in rows)
        and 0 <= about.defense_seed < 2**63
    )


def distinct(batches: list[tuple[list[int], Batch]]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Images, labels and batch rows of the distinct samples in ``batches``.

    Each batch comes with its samples' indices in the shard.
    """
    rows: dict[int, int] = {}
    images, labels, layout = [], [], []
    for indices, (pictures, targets) in batches:
        for index, picture, target in zip(indices, pictures, targets, strict=True):
            if index not in rows:
                rows[index] = len(rows)
                images.append(picture)
                labels.append(target)
        layout.append([rows[index] for index in indices])
    return torch.stack(images), torch.stack(labels), layout
