"""Sparse vector technique, as NVIDIA FLARE ships it: a share of the numbers, noised and cut off.

Numbers whose clipped size, with Laplace noise, passes a noisy threshold are accepted, in passes
over those that were not, until ``fraction`` of all is; of the accepted as many are drawn at random,
noised again, clipped and uploaded. Everything else is zero.

``epsilon`` is no budget of the upload. It is meant for one sample's effect on one number of at most
``gamma``; a sample moves all numbers at once, the technique's answers are not stopped where its
proof stops them, and values are noised *before* they are clipped, so that nothing bounds what the
noise has to hide. No guarantee is claimed, and no budget is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.defense import Defense, Informed
from fedsim.core.errors import FedsimError
from fedsim.core.learning import Update
from fedsim.defenses.laplace_noise import laplace
from fedsim.defenses.percentile_privacy import at_limit
from fedsim.defenses.sparsification import sparse_bytes

Positive = Annotated[float, Field(gt=0)]
_PASSES = 1000  # over what was not accepted, before the threshold is taken to be out of reach


@dataclass(frozen=True)
class SvtPrivacy(Defense):
    """``fraction`` of the numbers, ``epsilon`` of their selection, ``noise_var`` that of their
    values (the larger, the less noise, whatever its name says), ``gamma``: how large a number of
    one local step may be, ``tau``: the threshold. Defaults are FLARE's. ``replacement``: those that
    are uploaded are drawn with replacement, so that they are fewer. ``undrawn``: what becomes of
    numbers that were accepted and not drawn; FLARE's releases up to 2022 uploaded them ``raw``,
    neither noised nor clipped. What has no dimension is left as it is."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    epsilon: Positive = 0.1
    noise_var: Positive = 0.1
    gamma: Positive = 1e-5
    tau: Annotated[float, Field(ge=0)] = 1e-6
    replacement: bool = True
    undrawn: Literal["zero", "raw"] = "zero"

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        names = sorted(update.tensors)
        flat = torch.cat([update.tensors[n].flatten() / update.steps for n in names])
        uploaded = self._uploaded(flat, rng) * update.steps
        parts = uploaded.split([update.tensors[n].numel() for n in names])
        whole = {
            n: part.view_as(update.tensors[n]) if update.tensors[n].ndim else update.tensors[n]
            for n, part in zip(names, parts, strict=True)
        }
        return replace(update, tensors={n: whole[n] for n in update.tensors})

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Zeros were not uploaded. What stands at the limit is the sign of a number and its noise;
        of what was uploaded raw beyond it, everything is known."""
        if self.undrawn == "raw":
            return self._without_noised(seen)
        clipped = at_limit(seen.update.tensors.values(), self.gamma)
        words = f"svt_privacy: {clipped:.1%} of the numbers are signs"
        return replace(seen, masked=True, notes=(*seen.notes, words))

    def encoded_bytes(self, update: Update) -> int:
        return sparse_bytes(update)

    def _uploaded(self, flat: Tensor, rng: torch.Generator) -> Tensor:
        """What is uploaded of the numbers of one step."""
        wanted = min(math.ceil(len(flat) * self.fraction), len(flat))
        accepted = self._accepted(flat, wanted, rng)
        if self.replacement:
            drawn = accepted[torch.randint(len(accepted), (wanted,), generator=rng)]
        else:
            drawn = accepted[torch.randperm(len(accepted), generator=rng)[:wanted]]
        noise = 2 * self.gamma / self.noise_var * laplace((wanted,), rng)
        drawn, accepted = drawn.to(flat.device), accepted.to(flat.device)
        noisy = (flat[drawn] + noise.to(flat)).clamp(-self.gamma, self.gamma)
        uploaded = torch.zeros_like(flat)
        if self.undrawn == "raw":
            uploaded[accepted] = flat[accepted]
        last = torch.zeros(len(flat), dtype=torch.long, device=flat.device)
        last.scatter_reduce_(0, drawn, torch.arange(wanted, device=flat.device), "amax")
        uploaded[drawn] = noisy[last[drawn]]  # drawn twice: the last one counts, on every device
        return uploaded

    def _accepted(self, flat: Tensor, wanted: int, rng: torch.Generator) -> Tensor:
        """Places of numbers that pass the noisy threshold, at least as many as are ``wanted``."""
        threshold = self.tau + 2 * self.gamma / self.epsilon * float(laplace((1,), rng))
        budget = self.epsilon * (2 * wanted) ** (2 / 3)
        scale = 4 * self.gamma * wanted / budget
        sizes, waiting = flat.abs().clamp(max=self.gamma).cpu(), torch.arange(len(flat))
        accepted = list[Tensor]()
        for _ in range(_PASSES):
            passed = sizes[waiting] + scale * laplace((len(waiting),), rng) >= threshold
            accepted.append(waiting[passed])
            waiting = waiting[~passed]
            if len(flat) - len(waiting) >= wanted:
                return torch.cat(accepted)
        raise FedsimError(
            f"svt_privacy: too few numbers pass the threshold; tau {self.tau:g} is out of reach of "
            f"numbers clipped to {self.gamma:g}, make it smaller."
        )

    def _without_noised(self, seen: Informed) -> Informed:
        """The update without numbers up to the limit, which may be noise."""
        tensors = seen.update.tensors
        every = torch.cat([t.flatten().abs() for t in tensors.values()])
        # The limit is the number that occurs most often: raw ones hardly ever agree.
        values, counts = every[every > 0].unique(return_counts=True)
        limit = float(values[counts.argmax()]) if len(counts) and int(counts.max()) > 1 else 0.0
        bound = (1 + 1e-4) * limit
        rest = {n: torch.where(t.abs() > bound, t, torch.zeros_like(t)) for n, t in tensors.items()}
        share = float((every > bound).float().mean())
        words = f"svt_privacy: {share:.1%} of the numbers were uploaded raw, and are matched alone"
        if not share:
            return replace(seen, masked=True)
        update = replace(seen.update, tensors=rest)
        return replace(seen, update=update, masked=True, notes=(*seen.notes, words))
