"""Network: from the sketch of an update to the pictures behind it, with the error that counts.

It tells how the pictures differ from the mean surrogate picture, at a resolution of at most 32
pixels. How far its word is taken is a factor between 0 and 1, by
least squares on pictures it did not learn from; a network that learned nothing says the mean.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.inverting.rehearsal import Example, shrunk
from fedsim.core.metrics.pixels import decibel

MOST_PICTURES = 4  # behind one update; their orders are tried one by one
_CONSTANT = 1e-4  # the deviation of an entry that always is the same, rounding aside
_FAR = 10.0  # deviations from the usual, at most
_STRANGE = 1e3  # the cost of a picture in the place of one of another label


class Inversion(nn.Module):
    """Sketches (N, L) and counts of labels (N, C) to deviations (N, P, 3, R, R) from the mean."""

    usual: Tensor  # (L,) the mean sketch
    spread: Tensor  # (L,) the deviation of its entries
    mean: Tensor  # (3, S, S) the mean picture
    trust: Tensor  # how far its word is taken

    def __init__(self, length: int, classes: int, pictures: int, side: int, width: int):
        super().__init__()
        self.shape = {
            **{"length": length, "classes": classes, "pictures": pictures},
            **{"side": side, "width": width},
        }
        self.resolution = shrunk(torch.empty(1, 3, side, side)).shape[-1]
        self.enter = nn.Linear(length + classes, width)
        self.deepen = nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.leave = nn.Linear(width, pictures * 3 * self.resolution**2)
        nn.init.zeros_(self.leave.weight)  # it begins with the mean picture
        nn.init.zeros_(self.leave.bias)
        self.register_buffer("usual", torch.zeros(length))
        self.register_buffer("spread", torch.ones(length))
        self.register_buffer("mean", torch.zeros(3, side, side))
        self.register_buffer("trust", torch.ones(()))

    @classmethod
    def begun(
        cls, examples: Example, mean: Tensor, classes: int, width: int, seed: int
    ) -> Inversion:
        """A fresh one for sketches like these, which knows what is usual among them, and the
        ``mean`` picture (3, S, S)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pictures, side = examples.pictures.shape[1], mean.shape[-1]
            net = cls(examples.sketch.shape[1], classes, pictures, side, width)
        sketches = examples.sketch.float()
        deviation = sketches.std(0, correction=0)
        net.usual.copy_(sketches.mean(0))
        net.spread.copy_(torch.where(deviation > _CONSTANT, deviation, 1.0))
        net.mean.copy_(mean)
        return net

    def forward(self, examples: Example, dropout: Dropout | None = None) -> Tensor:
        drop = dropout or _kept
        sketch = (examples.sketch.to(self.usual) - self.usual) / self.spread
        counts = self._counts(examples.read)
        entered = self.enter(torch.cat([sketch.clamp(-_FAR, _FAR), counts], 1))
        hidden = drop(F.gelu(self.norms[0](entered)))
        hidden = hidden + drop(F.gelu(self.norms[1](self.deepen(hidden))))
        return self.leave(hidden).unflatten(1, (-1, 3, self.resolution, self.resolution))

    def wanted(self, examples: Example) -> Tensor:
        """The deviations that it should tell."""
        return examples.pictures.to(self.mean) - shrunk(self.mean[None])

    @torch.no_grad()
    def pictures(self, examples: Example) -> Tensor:
        """The pictures (N, P, 3, S, S) behind these updates."""
        deviations = self.trust * self(examples)
        whole = F.interpolate(deviations.flatten(0, 1), size=self.mean.shape[-1], mode="bilinear")
        return (self.mean + whole).clamp(0, 1).unflatten(0, deviations.shape[:2])

    @torch.no_grad()
    def examine(self, examples: Example) -> Exam:
        """Set the trust by clients that it did not learn from, and tell how it does on them."""
        told, wanted = self(examples), self.wanted(examples)
        wanted = in_order(told, wanted, examples)
        trust = (told * wanted).sum() / told.square().sum().clamp(min=1e-30)
        self.trust.copy_(trust.clamp(0, 1))
        errors = (self.trust * told - wanted).square().flatten(2).mean(2).flatten()
        blank = wanted.square().flatten(2).mean(2).flatten()
        return Exam(
            *(len(examples.labels), float(errors.mean()), float(self.trust)),
            *(_decibels(errors), _decibels(blank)),
        )

    def _counts(self, read: Tensor) -> Tensor:
        """How often each class was read, (N, C); zeros where nothing could be."""
        classes = self.shape["classes"]
        shown = F.one_hot(read.clamp(min=0).to(self.usual.device), classes).to(self.usual)
        return (shown * (read >= 0).to(shown)[..., None]).sum(1)


class Dropout:
    """Units left out by a coin of its own, so that a training that was cut goes on with the same
    numbers on any device."""

    def __init__(self, share: float, coin: torch.Generator):
        self.share, self.coin = share, coin

    def __call__(self, hidden: Tensor) -> Tensor:
        kept = torch.rand(hidden.shape, generator=self.coin) >= self.share
        return hidden * kept.to(hidden) / (1 - self.share)


def _kept(hidden: Tensor) -> Tensor:
    return hidden


@dataclass(frozen=True)
class Exam:
    """What a network does on ``clients`` that it did not learn from: its mean squared error, how
    far it is trusted, its PSNR and that of the mean picture, in dB."""

    clients: int
    error: float
    trust: float
    psnr: float
    psnr_of_mean: float

    @property
    def words(self) -> str:
        verb = "beats" if self.psnr > self.psnr_of_mean else "does not beat"
        return (
            f"on {self.clients} simulated clients with held-out surrogate pictures it scores "
            f"{self.psnr:.1f} dB and {verb} their mean picture ({self.psnr_of_mean:.1f} dB)"
        )


def error_of(guesses: Tensor, wanted: Tensor, examples: Example) -> Tensor:
    """The mean squared error (N,) of guesses (N, P, ...), each picture in its place."""
    return (guesses - in_order(guesses, wanted, examples)).square().flatten(1).mean(1)


def in_order(guesses: Tensor, wanted: Tensor, examples: Example) -> Tensor:
    """What is wanted (N, P, ...), in the order of the guesses.

    These stand in the order of the labels that were read: a picture goes to the place of its own
    label where there is one, and among several of a label to where it fits best.
    """
    order = best_order(guesses, wanted, examples)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return wanted[rows, order]


@torch.no_grad()
def best_order(guesses: Tensor, wanted: Tensor, examples: Example) -> Tensor:
    """Which picture belongs in which place, (N, P)."""
    count = guesses.shape[1]
    if count == 1:
        return torch.zeros(len(guesses), 1, dtype=torch.long, device=guesses.device)
    apart = guesses[:, :, None].flatten(3) - wanted[:, None].flatten(3)
    costs = apart.square().mean(-1)  # (N, places, pictures)
    strange = examples.read[:, :, None] != examples.labels[:, None]
    costs = costs + _STRANGE * strange.to(costs)
    orders = torch.tensor(list(itertools.permutations(range(count))), device=costs.device)
    totals = costs[:, torch.arange(count, device=costs.device), orders].sum(-1)  # (N, P!)
    return orders[totals.argmin(1)]


def _decibels(errors: Tensor) -> float:
    """The mean PSNR of pictures with these squared errors."""
    return float(decibel(errors).mean())
