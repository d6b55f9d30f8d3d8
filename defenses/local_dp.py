"""Local differential privacy of a whole update: clipped, then noised once, as Flower's LocalDpMod.

The noise is that of the Gaussian mechanism for one release; what several rounds cost is counted by
the accountant, because the mechanism's formula promises nothing above an epsilon of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedsim.core.defense import Budget, Defense, Exposure
from fedsim.core.learning import Update
from fedsim.defenses.accounting import spent
from fedsim.defenses.clipping import Clipping


@dataclass(frozen=True)
class LocalDp(Defense):
    """``clip``: the largest norm of an update; ``epsilon`` and ``delta`` of one round; the
    sensitivity is ``clip`` unless it is given, as Flower asks for it. ``everything`` is clipped as
    by `Clipping`; noise is added to what is trained."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    epsilon: Annotated[float, Field(gt=0)] = 10.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    sensitivity: Annotated[float, Field(gt=0)] | None = None
    everything: bool = False

    @property
    def deviation(self) -> float:
        """The noise that the Gaussian mechanism asks for."""
        reach = self.sensitivity if self.sensitivity is not None else self.clip
        return reach * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def budget(self, exposure: Exposure) -> Budget:
        """One release per round, counted by the accountant (see the module)."""
        total = spent(self.deviation / self.clip, 1.0, exposure.rounds, self.delta)
        return Budget(total, self.delta, "a client's taking part")

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        clipped = self._clipping.protect_update(update, rng)
        noisy = {
            name: t + self.deviation * torch.randn(t.shape, generator=rng).to(t)
            for name, t in clipped.tensors.items()
        }
        return replace(clipped, tensors=noisy)

    def without_noise(self) -> tuple[Defense, float]:
        return self._clipping, self.deviation

    @property
    def _clipping(self) -> Clipping:
        return Clipping(self.clip, everything=self.everything)
