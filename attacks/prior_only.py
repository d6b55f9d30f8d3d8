"""Prior only: the baseline that guesses without looking at the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.knowledge import View


@dataclass(frozen=True)
class PriorOnly(Attack):
    """The mean picture of the surrogate data where there is some, else the mean colour."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "normalisation", "batch_size"})
    uses: ClassVar[frozenset[str]] = frozenset({"surrogate"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if view.grants("surrogate"):
            picture = view.surrogate.mean(0)
        else:
            mean, _ = view.normalisation
            side = view.image_size
            picture = torch.tensor(mean).view(3, 1, 1).expand(3, side, side)
        images = picture.clamp(0, 1).repeat(view.batch_size, 1, 1, 1)
        progress(1, 1)
        return Reconstruction(images=images)
