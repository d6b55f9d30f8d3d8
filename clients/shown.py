"""Shown: what a client's model sees of the batches that were drawn, and what the vault keeps of it.

Without augmentation the model sees the pictures themselves, and the same one in two steps is one
picture. With it every view is a picture of its own, kept as the model saw it beside the picture it
was made from: the canary replays the views, so that no later version of a transform can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.clients.shards import Drawn
from fedsim.core.augment import Augmentation
from fedsim.core.learning import Batch
from fedsim.core.vault import distinct


@dataclass(frozen=True)
class Shown:
    """The batches of a round as the model sees them, and the truth behind them."""

    batches: list[Batch]
    images: Tensor  # the distinct pictures that the model sees
    labels: Tensor  # their classes; of a mixture, the dominant one
    layout: list[list[int]]  # which of them each step uses
    originals: Tensor | None = None
    origins: tuple[int, ...] = ()
    mixtures: Tensor | None = None

    def of_truth(self) -> dict[str, Any]:
        """What the vault keeps of it."""
        kept: dict[str, Any] = {
            "images": self.images, "labels": self.labels, "batches": self.layout
        }  # fmt: skip
        if self.originals is not None:
            kept |= {"originals": self.originals, "origins": list(self.origins)}
        return kept | ({} if self.mixtures is None else {"mixtures": self.mixtures})


def shown(
    drawn: list[Drawn], augment: Sequence[dict[str, Any]], classes: int, secret: int
) -> Shown:
    """What the model sees of these batches; the coins of the augmentation are drawn by the client's
    ``secret``, which is another one in every round."""
    pictures, classes_of, layout = distinct(drawn)
    if not augment:
        return Shown([batch for _, batch in drawn], pictures, classes_of, layout)
    augmentation = Augmentation.of(augment, pictures.shape[-1])
    views, mixtures, origins, steps = [], [], list[int](), list[list[int]]()
    for step, ((_, (images, labels)), rows) in enumerate(zip(drawn, layout, strict=True)):
        seen = augmentation(images, f"augment {secret} step {step}")
        mixing = torch.eye(len(images)) if seen.mixing is None else seen.mixing
        steps.append(list(range(len(origins), len(origins) + len(images))))
        origins += [rows[int(most)] for most in mixing.argmax(1)]
        views.append(seen.images)
        mixtures.append(mixing @ F.one_hot(labels, classes).float())
    images, soft = torch.cat(views), torch.cat(mixtures)
    mixed = bool(augmentation.mixing)
    labels = soft.argmax(1)
    learned = soft if mixed else labels
    batches = [(images[rows], learned[rows]) for rows in steps]
    kept = (pictures, tuple(origins), soft if mixed else None)
    return Shown(batches, images, labels, steps, *kept)
