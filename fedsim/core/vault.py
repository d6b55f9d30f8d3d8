"""Vault: the truth. Written by the client side, opened only by scoring.

Images, labels and the client's seeds, in a directory only its owner can enter. No module under
``attacks/`` imports this one, and while an attack runs nothing in its process can read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from fedsim.core.errors import NotGranted, RunError
from fedsim.core.knowledge import is_sealed
from fedsim.core.learning import Batch
from fedsim.core.observation import observation_name
from fedsim.core.store import save_tensors


@dataclass(frozen=True)
class Truth:
    """What a client learned from in one round.

    ``images`` (M, 3, H, W) in [0, 1] and ``labels`` (M,) are the distinct samples;
    ``batches`` lists, step by step, which of them were used.
    """

    images: Tensor
    labels: Tensor
    batches: list[list[int]]
    defense_seed: int
    trail: list[dict[str, str]]  # what each defense changed, as digests

    def replay(self) -> list[Batch]:
        """The batches as the client saw them."""
        return [(self.images[rows], self.labels[rows]) for rows in self.batches]


class Vault:
    """The truths of a run, and the private state of its clients."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, round_: int, client: int, truth: Truth) -> None:
        self._shut()
        about = {
            "batches": truth.batches,
            "defense_seed": truth.defense_seed,
            "trail": truth.trail,
        }
        save_tensors(
            self._truth_path(round_, client),
            {"images": truth.images, "labels": truth.labels},
            {"about": json.dumps(about)},
            mode=0o600,
        )

    def read(self, round_: int, client: int) -> Truth:
        if is_sealed():
            raise NotGranted("an attack tried to open the vault.")
        path = self._truth_path(round_, client)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                return Truth(file.get_tensor("images"), file.get_tensor("labels"), **about)
        except FileNotFoundError:
            raise RunError(
                f"the vault has no truth for {observation_name(round_, client)}."
            ) from None
        except Exception as error:
            raise RunError(
                f"the vault's '{path}' is damaged ({type(error).__name__}); this client's "
                f"reconstructions cannot be scored."
            ) from error

    def write_state(self, round_: int, client: int, state: dict[str, Tensor]) -> None:
        """A client's own state after a round: BatchNorm statistics it does not share, and what its
        defenses keep back."""
        self._shut()
        save_tensors(self._state_path(round_, client), state, mode=0o600)

    def read_state(self, before_round: int, client: int) -> dict[str, Tensor]:
        """The client's newest state from before a round; empty at its first."""
        if is_sealed():
            raise NotGranted("an attack tried to open the vault.")
        for round_ in range(before_round - 1, 0, -1):
            path = self._state_path(round_, client)
            if path.is_file():
                with safe_open(path, framework="pt") as file:
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {}

    def _truth_path(self, round_: int, client: int) -> Path:
        return self.root / f"{observation_name(round_, client)}.safetensors"

    def _state_path(self, round_: int, client: int) -> Path:
        return self.root / f"{observation_name(round_, client)}.state.safetensors"

    def _shut(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)


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
