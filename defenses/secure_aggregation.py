"""Secure aggregation (Bonawitz et al. 2017): the server learns the sum of a cohort, no summand.

Every pair of clients shares a mask that one adds and the other subtracts, in whole numbers modulo
2^64: an upload alone is uniformly random, and in the sum the masks cancel. Where a client drops
out, the others reveal the masks they shared with it, so that the sum of those who stayed remains.

What is simulated: keys are not agreed upon, pair seeds are hashes; that survivors reveal the seeds
of dropped clients is assumed to work (secret sharing is left out). What is real: every upload, byte
for byte, and that attacks and server see nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.learning import Update
from fedsim.core.seeds import seed_from


@dataclass(frozen=True)
class SecureAggregation(Defense):
    """``bits`` behind the binary point: numbers are rounded to 2^-bits before they are masked."""

    bits: Annotated[int, Field(ge=8, le=40)] = 24

    def at_round(self, round_: int, client: int, cohort: Sequence[int]) -> Masking:
        return Masking(self.bits, round_, client, tuple(cohort))

    def reveal(
        self, total: Mapping[str, Tensor], round_: int, cohort: Sequence[int], stayed: Sequence[int]
    ) -> dict[str, Tensor]:
        """The sum of what ``stayed`` uploaded, from the sum of their masked uploads."""
        gone = [client for client in cohort if client not in stayed]
        sums = {}
        for name, tensor in total.items():
            unmasked = tensor.clone()
            for client in stayed:
                for other in gone:  # a mask that nobody is left to cancel
                    unmasked -= _signed_mask(round_, client, other, name, tensor)
            sums[name] = unmasked.double() / 2**self.bits
        return {name: tensor.float() for name, tensor in sums.items()}


@dataclass(frozen=True)
class Masking(SecureAggregation):
    """The defense of one client in one round."""

    round: int = 0
    client: int = 0
    cohort: tuple[int, ...] = ()

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._masked(n, t) for n, t in update.tensors.items()})

    def _masked(self, name: str, tensor: Tensor) -> Tensor:
        masked = (tensor.detach().double().cpu() * 2**self.bits).round().to(torch.int64)
        for other in self.cohort:
            if other != self.client:
                masked += _signed_mask(self.round, self.client, other, name, masked)
        return masked


def _signed_mask(round_: int, client: int, other: int, name: str, like: Tensor) -> Tensor:
    """What ``client`` adds for its pair with ``other``; the other adds the negative of it."""
    low, high = sorted((client, other))
    seed = seed_from(f"pair {low} {high} round {round_} {name}", size=7)
    coin = torch.Generator().manual_seed(seed)
    mask = torch.randint(-(2**63), 2**63 - 1, like.shape, generator=coin, dtype=torch.int64)
    return mask if client == low else -mask
