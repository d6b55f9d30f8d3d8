"""Problem: one observation as a matching attack sees it, and which images stand behind it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.core.knowledge import View
from fedsim.core.learning import Protocol, Update


@dataclass
class Problem:
    """One observation as a matching attack sees it."""

    view: View
    device: torch.device
    model: nn.Module
    update: Update
    side: int
    count: int  # images to find
    batches: list[list[int]]  # which of them each local step used, as far as one can know
    local: Literal["single", "unroll", "surrogate"]
    masked: bool  # zeros of the update were not uploaded
    notes: list[str] = field(default_factory=list)

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """Black and white after normalisation."""
        mean, std = (torch.tensor(c, device=self.device) for c in self.view.normalisation)
        return ((0 - mean) / std).view(3, 1, 1), ((1 - mean) / std).view(3, 1, 1)

    def normalised(self, images: Tensor) -> Tensor:
        low, high = self.box
        return images.to(self.device) * (high - low) + low

    def pixels(self, images: Tensor) -> Tensor:
        low, high = self.box
        return ((images - low) / (high - low)).clamp(0, 1)


def batches_of(view: View, update: Update, size: int, pictures: int | None) -> list[list[int]]:
    """Which images each local step used, as the protocol lets one assume.

    Epochs go over the same images each time (in an order that only the client knows; ours is
    fixed); plain steps take new ones each time, unless ``pictures`` says there are fewer.
    """
    if update.kind == "gradient" or not view.grants("local_steps"):
        return [list(range(pictures or size))]
    steps, epochs = view.local_steps
    if epochs:
        count = pictures or max(1, round(update.num_examples / epochs))
        once = [list(range(at, min(at + size, count))) for at in range(0, count, size)]
        return once * epochs
    total = (steps or 1) * size
    count = min(pictures or total, total)
    return [
        [row % count for row in range(step * size, (step + 1) * size)] for step in range(steps or 1)
    ]


def protocol_of(view: View) -> Protocol:
    """The steps to unroll; a clipped gradient is the (negative) delta of one step of size one."""
    protocol = view.protocol()
    if protocol.upload == "delta":
        return protocol
    return replace(protocol, lr=1.0, momentum=0.0, weight_decay=0.0)
