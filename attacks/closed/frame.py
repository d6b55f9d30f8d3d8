"""Frame of the closed forms: what stands around one linear solve for one picture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.attacks.labels import labels_left, recover_labels
from fedsim.core.anatomy import VitParts
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.spec import Upload


@dataclass
class Solved:
    """A picture (3, H, W) as the model sees it, in float64; ``loss``: the relative residual;
    ``undo``: what a defense did to pictures before the model saw them, taken back."""

    image: Tensor
    loss: float | None = None
    notes: list[str] = field(default_factory=list)
    undo: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class ClosedForm(Attack, ABC):
    """From a View to a Reconstruction: a subclass solves; the rest is here.

    A batch of several pictures mixes in one system; the blend is then given once for each.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"optimizer", "learning_rate"})  # the client's loss

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            {"update", "weights", "architecture", "image_size", "normalisation", "batch_size"}
        )

    @abstractmethod
    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        """The picture behind the view's update."""

    def finish(self, image: Tensor, notes: list[str]) -> Tensor:
        """A last touch on the picture in [0, 1]."""
        return image

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        model, batch = view.model(), view.batch_size
        solved = self.solve(view, model, progress)
        mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in view.normalisation)
        image = self.finish((solved.image.cpu() * std + mean).clamp(0, 1), solved.notes)
        if solved.undo is not None:
            image = solved.undo(image[None])[0]
        return Reconstruction(
            images=image.float().repeat(batch, 1, 1, 1),
            labels=_labels_beside(view, model, solved.notes),
            loss=solved.loss,
            notes=solved.notes,
        )


def _labels_beside(view: View, model: nn.Module, notes: list[str]) -> Tensor | None:
    """The labels, where the head was uploaded; the picture does not depend on them."""
    if (left := labels_left(view)) is not None:
        return left
    try:
        # Of a delta the steps would have to be known as well.
        protocol = view.known_protocol() if view.update.kind is Upload.GRADIENT else None
        return recover_labels(view.update, model, view.batch_size, protocol=protocol)
    except AttackError as error:
        notes.append(f"no labels: {error}")
        return None


def uploaded(update: Mapping[str, Tensor], names: Iterable[str], attack: str) -> list[Tensor]:
    """The named tensors of an update in float64; one that is missing or not finite is an error."""
    names = list(names)
    missing = [name for name in names if name not in update]
    if missing:
        raise AttackError(
            f"{attack} needs the gradient of {' and '.join(missing)}, which the client did not "
            f"upload (a frozen or withheld part)."
        )
    tensors = [update[name].double().cpu() for name in names]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise AttackError("the update holds numbers that are not finite.")
    return tensors


def refuse_frozen(model: nn.Module, names: Iterable[str], attack: str) -> None:
    """Raise, before a round, where tensors are not trained whose gradient an attack reads."""
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    missing = [name for name in names if name not in trained]
    if missing:
        raise AttackError(
            f"{attack} needs the gradient of {' and '.join(missing)}, which nobody trains in this "
            f"federation (train.trainable, or a defense that freezes a part)."
        )


@dataclass(frozen=True)
class Hidden:
    """Places whose gradient one unknown embedding took (MJP): of them only its sum is known, so one
    solution stands for all."""

    places: Tensor  # (T,), true where a token is hidden
    unknown: str  # the embedding's name

    @classmethod
    def among(cls, rows: Tensor, update: Mapping[str, Tensor], parts: VitParts) -> Hidden | None:
        """Those without a gradient of their own in ``rows``, (T, D), of which the last are the
        patches'; None where nothing is hidden."""
        if parts.unknown is None or parts.unknown not in update:
            return None
        places = (rows == 0).all(1)
        places[: len(rows) - parts.tokens] = False
        return cls(places, parts.unknown) if bool(places.any()) else None

    def joined(self, rows: Tensor, update: Mapping[str, Tensor]) -> Tensor:
        """The rows that are shown, and one for all that are hidden."""
        return torch.cat([rows[~self.places], update[self.unknown].double().cpu().reshape(1, -1)])

    def spread(self, solved: Tensor) -> Tensor:
        """A solution for every place again."""
        whole = solved[-1:].repeat(len(self.places), 1)
        whole[~self.places] = solved[:-1]
        return whole


def fold_patches(patches: Tensor, parts: VitParts) -> Tensor:
    """Patches (N, 3 p q), as the projection reads them, to an image (3, H, W)."""
    (rows, columns), (p, q) = parts.grid, parts.patch_size
    if parts.layout is not None:
        patches = torch.empty_like(patches).index_copy_(1, torch.tensor(parts.layout), patches)
    return (
        patches.view(rows, columns, 3, p, q)
        .permute(2, 0, 3, 1, 4)
        .reshape(3, rows * p, columns * q)
    )
