"""Attacks and defenses that misbehave, for tests; named in specs by their import path."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import ray
import torch
from torch import Tensor, nn

from fedsim.core.attack import Progress, Reconstruction
from fedsim.core.defense import Defense
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Update


def _grey(view: View) -> Reconstruction:
    side = view.image_size
    return Reconstruction(torch.full((view.batch_size, 3, side, side), 0.5))


@dataclass(frozen=True)
class KillsItsWorker:
    """Dies by signal once, as a worker does that the system kills; the second try works."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    marker: str

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _grey(view)


@dataclass(frozen=True)
class Crashes:
    """A bug in an attack."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        raise ZeroDivisionError("a bug in the attack")


@dataclass(frozen=True)
class Declines:
    """An attack that says it does not apply."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        raise AttackError("this attack does not apply here.")


@dataclass(frozen=True)
class Greedy:
    """Reads a field it never said it needs."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        view.oracle_labels  # noqa: B018
        return _grey(view)


@dataclass(frozen=True)
class Burglar:
    """Goes for the vault itself."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    vault: str

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        from fedsim.core.vault import Vault

        truth = Vault(Path(self.vault)).read(1, 0)
        return Reconstruction(truth.images)


@dataclass(frozen=True)
class OnLabel(Defense):
    """Misbehaves on batches that hold ``label``: raises, or uploads numbers that are not finite, or
    far too large."""

    label: int
    how: str = "raise"
    words: str = "this client is broken"

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        hit = bool((labels == self.label).any())
        if hit and self.how == "raise":
            raise RuntimeError(self.words)
        object.__setattr__(self, "_hit", hit)
        return images, labels

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        if not getattr(self, "_hit", False):
            return update
        value = 3e38 if self.how == "huge" else float("nan")
        return replace(
            update, tensors={n: torch.full_like(t, value) for n, t in update.tensors.items()}
        )


@dataclass(frozen=True)
class Liar(Defense):
    """Uploads every tensor twice over, in a shape that an average would take without a word."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: torch.stack([t, t]) for n, t in update.tensors.items()})


@dataclass(frozen=True)
class KillsItsClient(Defense):
    """Kills the client's process by signal once; the second try works."""

    marker: str

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return images, labels


@dataclass(frozen=True)
class SaysWhere:
    """Grey, once it has begun on so many nodes, which the marker lists; a note has its folder."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size", "weights"})
    nodes: int = 0
    marker: str = ""

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if self.marker:
            with open(self.marker, "a") as stream:
                stream.write(f"{ray.get_runtime_context().get_node_id()}\n")
            until = time.monotonic() + 120
            while len(set(Path(self.marker).read_text().split())) < self.nodes:
                assert time.monotonic() < until, "the other nodes never came"
                time.sleep(0.1)
        result = _grey(view)
        assert view.weights
        result.notes.append(str(view.notebook.path.parent))
        return result
