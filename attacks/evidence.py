"""Evidence: what updates say of one gradient, once all is left out that references explain.

Gradients of different pictures are alike to the most part. Let the rows of D be those of R
references, and w what is left of a candidate's gradient a,

    w = a - D^T (D D^T + ridge)^-1 D a

An update d that has the share s of the candidate in it gives  <w, d> / |w|_a = s |w|_a  more than
chance does, with  |w|_a^2 = <w, a>.  What chance gives the references tell, none of which is in the
update: leaving each of them out of D in turn, its own statistic is
[K^-1 D d]_r / sqrt([K^-1]_rr),  K = D D^T + ridge.  All is computed from inner products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.005  # of the mean squared size of a reference's gradient
_TRUST = 8  # other updates, which weigh as much as the references do


@dataclass(frozen=True)
class Evidence:
    """For one gradient and J updates: what stands out, ``told`` (J,), in units of what ``chance``
    (J,) gives; and how large its own part is, |w|_a."""

    told: Tensor
    chance: Tensor
    size: float


class Explained:
    """What references, in blocks of (R, n), explain of updates (J, n)."""

    def __init__(self, updates: Tensor, blocks: Sequence[Tensor], products: Tensor | None = None):
        self.updates, self.blocks = updates, tuple(blocks)
        if products is None:
            products = torch.cat(
                [torch.cat([(a @ b.T).double() for b in self.blocks], 1) for a in self.blocks]
            )
        self.products = products
        self.inverse = _inverse(self.products)
        self.seen = torch.cat([(block @ updates.T).double() for block in self.blocks])  # (R, J)
        left_out = (self.inverse @ self.seen) / self.inverse.diagonal().sqrt()[:, None]
        self.chance = left_out.square().mean(0).sqrt().clamp(min=1e-30)

    def with_more(self, references: Tensor) -> Explained:
        """The same with another block of references, without a second look at the first ones."""
        if not len(references):
            return self
        across = torch.cat([(block @ references.T).double() for block in self.blocks])
        corner = (references @ references.T).double()
        products = torch.cat(
            [torch.cat([self.products, across], 1), torch.cat([across.T, corner], 1)]
        )
        return Explained(self.updates, [*self.blocks, references], products)

    def scale(self, pictures: int) -> float:
        """How large the first update is beside means of so many references: both seen through the
        first half of these, the means are of the second. What lies outside of their span, as noise
        does for the most part, does not count; what their own mean is, may cancel."""
        half = max(1, len(self.products) // 2)
        through = _inverse(self.products[:half, :half])
        rest = self.products[:half, half:]
        if not rest.shape[1]:
            return 1.0
        means = [part.mean(1) for part in rest.split(pictures, 1) if part.shape[1] == pictures]
        means = means or [rest.mean(1)]
        update, *usual = (float(v @ through @ v) for v in (self.seen[:half, 0], *means))
        return (update / max(sum(usual) / len(usual), 1e-30)) ** 0.5

    def beside(self, gradient: Tensor) -> Evidence:
        """What the updates say of a gradient (n,)."""
        inner = torch.cat([(block @ gradient).double() for block in self.blocks])
        weights = self.inverse @ inner
        own = float(gradient.double().square().sum() - weights @ inner)
        size = max(own, 1e-30) ** 0.5
        told = ((self.updates @ gradient).double() - self.seen.T @ weights) / size
        return Evidence(told / self.chance, self.chance, size)


def _inverse(products: Tensor) -> Tensor:
    ridge = RIDGE * products.diagonal().mean().clamp(min=1e-30)
    inverse: Tensor = torch.linalg.inv(products + ridge * torch.eye(len(products)).to(products))
    return inverse


def likelihood(evidence: Evidence, share: float, others: Tensor) -> float:
    """How much likelier the first update is with the gradient in it than without, in logarithms:
    two normal distributions apart by what its ``share`` should give. ``others`` are what updates
    without it say, (K,); with few of them, the references count for more."""
    centre = float(others.sum()) / (len(others) + _TRUST)
    wide = (_TRUST + float((others - centre).square().sum())) / (_TRUST + max(0, len(others) - 1))
    apart = share * evidence.size / float(evidence.chance[0])
    return (apart * (float(evidence.told[0]) - centre) - apart**2 / 2) / wide
