"""Percentile privacy, as NVIDIA FLARE ships it: only the largest changes, and those cut off.

After Shokri and Shmatikov 2015. Of the update per local step, numbers below a percentile of all
their sizes become zero, and the others are clipped to an interval. It is a rule without a coin: no
differential privacy is promised or given, and no budget is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.defense import Defense, Informed
from fedsim.core.learning import Update
from fedsim.defenses.sparsification import sparse_bytes


@dataclass(frozen=True)
class PercentilePrivacy(Defense):
    """``percentile``: of the sizes of all numbers together, below which they become zero;
    ``gamma``: how large a number of one local step may be. Defaults are FLARE's. What has no
    dimension is left as it is. FLARE's filter runs over all that travels; ours over what is
    trained."""

    percentile: Annotated[float, Field(ge=0, le=100)] = 10.0
    gamma: Annotated[float, Field(gt=0)] = 0.01

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        steps = update.steps
        sizes = torch.cat([(t / steps).abs().flatten() for t in update.tensors.values()])
        cutoff = percentile_of(sizes, self.percentile)

        def filtered(tensor: Tensor) -> Tensor:
            if not tensor.ndim:
                return tensor
            each = tensor / steps
            large = torch.where(each.abs() < cutoff, torch.zeros_like(each), each)
            return large.clamp(-self.gamma, self.gamma) * steps

        return replace(update, tensors={n: filtered(t) for n, t in update.tensors.items()})

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Zeros were not uploaded. Of what was clipped, sign and a bound are known: it is matched
        at the bound."""
        clipped = at_limit(seen.update.tensors.values(), self.gamma)
        words = f"percentile_privacy: {clipped:.1%} of the numbers stand at the limit"
        return replace(seen, masked=True, notes=(*seen.notes, words))

    def encoded_bytes(self, update: Update) -> int:
        return sparse_bytes(update)


def percentile_of(sizes: Tensor, percentile: float) -> Tensor:
    """As numpy has it, between two neighbours in proportion; of any number of sizes."""
    rank = percentile / 100 * (len(sizes) - 1)
    low = int(rank)
    below = sizes.kthvalue(low + 1).values
    above = sizes.kthvalue(min(low + 2, len(sizes))).values
    return below + (rank - low) * (above - below)


def at_limit(tensors: object, gamma: float) -> float:
    """The share of all uploaded numbers that stand at the limit, a whole number of steps times
    ``gamma``; none where the largest is something else."""
    numbers = torch.cat([t.flatten().abs() for t in tensors])  # type: ignore[attr-defined]
    numbers = numbers[numbers > 0]
    if not len(numbers):
        return 0.0
    steps = float(numbers.max()) / gamma
    if round(steps) < 1 or abs(steps - round(steps)) > 1e-3 * steps:
        return 0.0
    return float((numbers > (1 - 1e-4) * numbers.max()).float().mean())
