"""Gates: let through, of many pictures of one class, the one with the least feature.

A gate stands on the projection x = v.f of a picture's features on a random direction. For pictures
of its class it makes 1 - p_c = w(x) = sigmoid(-slope (x - theta)), which is what each sends into
the network. Below theta that is all of it. Above, it falls off exponentially, and float32 holds it
down to e^-87, if it is made by the rows of the other classes: p_c - 1 has only 24 bits, their p_j
have their exponents. So with theta below every picture the least one outweighs the next by
e^(slope (x_2 - x_1)), wherever it lies within reach.

What arrives tells how many pictures it is made of. With W = sum_i w(x_i), and the mean projection
x~ = sum_i w(x_i) x_i / W, which is read from the head, W / w(x~) is the number of pictures where
they are equal, and e^H for exponential weights, with H the entropy of the shares: one exactly where
one picture is alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedsim.core.anatomy import head_names, layer_of
from fedsim.core.learning import Protocol

_RANGE = 60.0  # nats between the ends of the interval; e^-87 is the least normal float32
_STEEP = 1000.0  # slope times interval of a gate that must not lean on small numbers
_STEEPEST = 5e4  # the loss of a picture is the slope times how far it is below
_AT_ONCE = 16  # pictures
_DRAWS = 200  # batches drawn from known pictures, to see where the least of a batch lies
_SILENT = 1e-37
_CLOSE = 1e-3  # projections that are not told apart
_NARROWEST = 5e-3  # steeper, and the rounding of logits in float32 would show in the count
_BLIND_PICTURES = 64


class Interval(NamedTuple):
    """Where the least projection is believed to be; ``bounded``: a reply showed that it is at most
    ``high``, and not a guess."""

    low: float
    high: float
    bounded: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether it is too narrow for a gate to tell more: two pictures lie side by side."""
        return self.high - self.low < _CLOSE


@dataclass(frozen=True)
class Gate:
    """``seed``: of the direction; ``steep``: only what is below theta counts, because what arrives
    is rounded (weights after a step, fixed-point sums)."""

    seed: int
    theta: float
    slope: float
    low: float
    high: float
    bounded: bool = False
    steep: bool = False

    @classmethod
    def within(cls, seed: int, interval: Interval, *, steep: bool, at: float | None = None) -> Gate:
        """The gate that tells pictures apart between the ends of an interval."""
        width = max(interval.high - interval.low, _NARROWEST)
        if steep:
            theta = (interval.low + interval.high) / 2 if at is None else at
            return cls(seed, theta, min(_STEEP / width, _STEEPEST), *interval, steep=True)
        return cls(seed, interval.low, _RANGE / width, *interval)

    def direction(self, size: int) -> Tensor:
        vector = torch.randn(size, generator=torch.Generator().manual_seed(self.seed))
        return vector / vector.norm()

    def head(self, classes: int, size: int, target: int) -> tuple[Tensor, Tensor]:
        """Weight (C, D) and bias (C,) of a classifier that is this gate."""
        row = self.slope * self.direction(size)
        edge = self.slope * self.theta - math.log(classes - 1)
        weight, bias = torch.zeros(classes, size), torch.zeros(classes)
        if self.steep:  # the others start at zero, so that their steps are not rounded away
            weight[target], bias[target] = row, -edge
        else:
            weight[:], bias[:] = -row, edge
            weight[target], bias[target] = 0.0, 0.0
        return weight, bias

    def passes(self, x: float) -> float:
        """w(x), what a picture with this projection sends."""
        return 1 / (1 + math.exp(min(self.slope * (x - self.theta), 700.0)))

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Passed:
    """What came through a gate: W, the mean projection x~, and the number of pictures W / w(x~)."""

    total: float
    mean: float | None
    count: float | None


def read_gate(gate: Gate, weight: Tensor, bias: Tensor, target: int, pictures: int) -> Passed:
    """From the head's mean gradient over so many pictures, all of them of the target's class."""
    others = torch.arange(len(bias)) != target
    total = pictures * float(bias[others].sum())
    if total <= _SILENT * pictures:
        return Passed(0.0, None, 0.0)
    features = weight[others].sum(0) / bias[others].sum()
    mean = float(features @ gate.direction(weight.shape[1]).double())
    return Passed(total, mean, total / gate.passes(mean))


def narrowed(gate: Gate, passed: Passed) -> tuple[Interval, bool]:
    """Where the least projection lies after a reply, and whether that agrees with the replies
    before: not after a client took other pictures.

    The least is at most the mean x~. It sends at most W, so it is at least where w = W.
    """
    width, margin = gate.high - gate.low, 0.5 / gate.slope
    if passed.mean is None or passed.total <= 0:  # all are above what the gate reaches
        floor = gate.theta if gate.steep else gate.theta + _RANGE / gate.slope
        left = gate.high - floor
        if gate.bounded and left > _CLOSE * max(1.0, abs(floor)):
            return Interval(floor, gate.high, True), True
        return Interval(floor, floor + 2 * max(left, width / 2, _CLOSE)), not gate.bounded
    if passed.mean < gate.low - margin:
        return Interval(passed.mean - 2 * width, passed.mean + margin, True), not gate.bounded
    floor = gate.low
    if passed.total < 0.5:
        floor = max(floor, gate.theta + math.log(1 / passed.total - 1) / gate.slope)
    ceiling = min(gate.high, passed.mean) if gate.bounded else passed.mean
    return Interval(floor - margin, max(floor, ceiling) + margin, True), True


def first_interval(projections: Tensor, batch: int) -> Interval:
    """Where the least of a batch lies, by batches drawn from projections (N,) of known pictures."""
    coin = torch.Generator().manual_seed(0)
    rows = torch.randint(len(projections), (_DRAWS, batch), generator=coin)
    least = projections.double()[rows].amin(1)
    low, high = (float(torch.quantile(least, q)) for q in (0.02, 0.98))
    spread = float(projections.double().std()) if len(projections) > 1 else 1.0
    return Interval(low, max(high, low + 0.1 * max(spread, 1e-3)))


def first_theta(projections: Tensor, batch: int) -> float:
    """The 1/B quantile: of all thresholds it leaves exactly one of B pictures most often."""
    return float(torch.quantile(projections.double(), 1 / max(batch, 2)))


@torch.no_grad()
def features_of(model: nn.Module, images: Tensor, protocol: Protocol) -> Tensor:
    """What the head of a model is fed, (N, D), for images in [0, 1]."""
    fed: list[Tensor] = []
    head = layer_of(model, head_names(model)[0])
    hook = head.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].detach()))
    try:
        for some in images.split(_AT_ONCE):
            model(protocol.normalise(some))
    finally:
        hook.remove()
    return torch.cat([features.flatten(1) for features in fed])


def made_up_pictures(side: int) -> Tensor:
    """Pictures of a server without any: noise with the 1/f spectrum of natural scenes, in mostly
    one colour, of random brightness and contrast."""
    coin = torch.Generator().manual_seed(0)
    count = _BLIND_PICTURES
    down, across = torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None]
    amplitude = 1 / (down.square() + across.square()).sqrt().clamp(min=1 / side)
    noise = torch.randn(count, 4, *amplitude.shape, 2, generator=coin)
    scenes = torch.fft.irfft2(torch.view_as_complex(noise) * amplitude, s=(side, side))
    scenes = (scenes - scenes.mean((2, 3), keepdim=True)) / scenes.std()
    contrast = 0.3 + 0.9 * torch.rand(count, 1, 1, 1, generator=coin)
    brightness = 0.2 + 0.6 * torch.rand(count, 1, 1, 1, generator=coin)
    return (brightness + contrast * (0.24 * scenes[:, :1] + 0.1 * scenes[:, 1:])).clamp(0, 1)
