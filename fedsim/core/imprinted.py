"""Imprinted: any model behind a module of bins, as a server may announce it (Fowl et al. 2022).

It is an architecture like any other, which every client builds and anybody who looks can see; what
the bins are for, only the weights tell (`fedsim.attacks.manoeuvres.imprint_layer`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FIRST, SECOND = "imprint_first", "imprint_second"


class Imprinted(nn.Module):
    """A model behind two linear layers with a ReLU between them, which add to its picture."""

    def __init__(self, model: nn.Module, side: int, bins: int):
        super().__init__()
        pixels = 3 * side * side
        self.imprint_first = nn.Linear(pixels, bins)
        self.imprint_second = nn.Linear(bins, pixels)
        self.model = model

    def get_classifier(self) -> nn.Module | None:
        """The head of the model behind, for whoever looks for it by timm's name."""
        getter = getattr(self.model, "get_classifier", None)
        head: nn.Module | None = getter() if getter is not None else None
        return head

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.imprint_first(images.flatten(1)))
        result: Tensor = self.model(images + self.imprint_second(hidden).view_as(images))
        return result
