"""Objectives: how far a gradient is from the one observed, and the derivative of that distance.

Every objective is written once, as its value and its analytic derivative v in the gradient. That is
all the search needs: the derivative of the matching loss in the images is that of <v, gradient>
with v held fixed. All of them are of the form

    v_l = own_l g_l + towards_l t_l (+ an extra term)

layer by layer, so an objective only computes a few numbers per layer, and v is never built where it
is merely added to something. Gradients come as a list of one tensor (S, ...) per layer, with a
leading dimension of seeds; the target's layers have no such dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedsim.core.errors import AttackError

_TINY = 1e-30


class Target:
    """What is to be matched: one tensor per layer, their norms, and masks where it is sparse."""

    def __init__(self, tensors: Mapping[str, Tensor], *, masked: bool = False):
        if not tensors:
            raise AttackError("no layer of the update is left to match.")
        self.names = list(tensors)
        self.tensors = [tensor.detach().contiguous() for tensor in tensors.values()]
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors):
            raise AttackError("the update holds numbers that are not finite.")
        self.flat = [tensor.flatten() for tensor in self.tensors]
        self.squares = torch.stack([tensor.square().sum() for tensor in self.tensors])
        if not float(self.squares.sum()) > 0:
            raise AttackError("the update is zero: there is nothing to match.")
        self.masks = [tensor != 0 for tensor in self.tensors] if masked else None

    def __len__(self) -> int:
        return len(self.tensors)

    def seen(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """``gradients`` without what the client did not upload."""
        if self.masks is None:
            return gradients
        return [gradient * mask for gradient, mask in zip(gradients, self.masks, strict=True)]


@dataclass
class Distance:
    """The value (S,) of an objective and its derivative v, as factors (L, S) by layer."""

    value: Tensor
    own: Tensor  # of the gradient
    towards: Tensor  # of the target
    norm: Tensor  # |v|, (S,)
    gradients: Sequence[Tensor]  # as the objective saw them: masked
    extra: list[Tensor] | None = None

    def derivative(self, target: Target) -> list[Tensor]:
        """v itself, a tensor (S, ...) per layer."""
        layers = []
        for i, (gradient, wanted) in enumerate(zip(self.gradients, target.tensors, strict=True)):
            v = gradient * along(self.own[i], gradient)
            v.addcmul_(wanted, along(self.towards[i], gradient))
            layers.append(v if self.extra is None else v + self.extra[i])
        return layers


class Objective(Protocol):
    """The distance of gradients, (S, ...) per layer, to the target."""

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance: ...


def is_scale_free(objective: Objective) -> bool:
    """Whether a target of another size is at the same distance."""
    return bool(getattr(objective, "scale_free", False))


@dataclass(frozen=True)
class SquaredL2:
    """sum_l |g_l - t_l|^2: DLG, and the first term of APRIL and TAG."""

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        gradients = target.seen(gradients)
        squares = _residuals(gradients, target)
        own = torch.full_like(squares, 2.0)
        value = squares.sum(0)
        return Distance(value, own, -own, 2 * value.sqrt(), gradients)


@dataclass(frozen=True)
class LayerL2:
    """sum_l |g_l - t_l|, norms not squared: GradInversion Eq. 3, GradViT Eq. 3.

    ``relative`` divides each norm by that of the target's layer, for small networks whose layers
    differ much in size.
    """

    relative: bool = False

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        gradients = target.seen(gradients)
        norms = _residuals(gradients, target).sqrt()  # (L, S)
        weights = torch.ones_like(target.squares)
        if self.relative:
            used = target.squares > 0
            weights = torch.where(used, target.squares.clamp(min=_TINY).rsqrt(), 0.0)
        own = weights[:, None] / norms.clamp(min=_TINY)
        value = (weights[:, None] * norms).sum(0)
        size = (weights.square()[:, None] * (norms > _TINY)).sum(0).sqrt()
        return Distance(value, own, -own, size, gradients)


@dataclass(frozen=True)
class Cosine:
    """1 - cos(g, t) over all layers at once: Inverting Gradients Eq. 4, GIAS."""

    scale_free: ClassVar[bool] = True

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        gradients = target.seen(gradients)
        squares, dots = _squares_and_dots(gradients, target)
        g, t, dot = squares.sum(0).clamp(min=_TINY), target.squares.sum(), dots.sum(0)
        size = (g * t).sqrt()
        cosine = dot / size
        own, towards = cosine / g, -1 / size
        norm = ((1 - cosine.square()).clamp(min=_rounding(cosine)) / g).sqrt()
        layers = torch.ones_like(squares)
        return Distance(1 - cosine, own * layers, towards * layers, norm, gradients)


@dataclass(frozen=True)
class LayerCosine:
    """mean_l (1 - cos(g_l, t_l)); layers without any target gradient are left out."""

    scale_free: ClassVar[bool] = True

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        gradients = target.seen(gradients)
        squares, dots = _squares_and_dots(gradients, target)
        g = squares.clamp(min=_TINY)
        used = (target.squares > 0).to(g.dtype)[:, None]
        share = used / used.sum()
        size = (g * target.squares[:, None]).sqrt().clamp(min=_TINY)
        cosine = dots / size
        own, towards = share * cosine / g, -share / size
        norm = (
            (share.square() * (1 - cosine.square()).clamp(min=_rounding(cosine)) / g).sum(0).sqrt()
        )
        return Distance((share * (1 - cosine)).sum(0), own, towards, norm, gradients)


@dataclass(frozen=True)
class Tag:
    """sum_l |g_l - t_l|^2 + a |g_l - t_l|_1: TAG (Deng et al. 2021)."""

    alpha: float = 0.1

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        base = SquaredL2()(gradients, target)
        differences = [g - t for g, t in zip(base.gradients, target.tensors, strict=True)]
        absolute = torch.stack([_by_seed(d).abs().sum(1) for d in differences]).sum(0)
        extra = [d.sign_().mul_(self.alpha) for d in differences]
        count = sum(t.numel() for t in target.tensors)
        norm = base.norm + self.alpha * count**0.5  # a bound: it only sets a step size
        value = base.value + self.alpha * absolute
        return Distance(value, base.own, base.towards, norm, base.gradients, extra)


@dataclass(frozen=True)
class PositionCosine:
    """``base`` - a cos(g_pe, t_pe): APRIL Eq. 11 with the layer of the position embedding."""

    base: Objective
    layer: str
    alpha: float

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        if self.layer not in target.names:
            raise AttackError(
                f"the gradient of {self.layer} is not in the update: there is no position term."
            )
        distance, index = self.base(gradients, target), target.names.index(self.layer)
        position = distance.gradients[index].flatten(1)
        g = position.square().sum(1).clamp(min=_TINY)
        size = (g * target.squares[index]).sqrt().clamp(min=_TINY)
        cosine = (position @ target.flat[index]) / size
        own, towards = distance.own.clone(), distance.towards.clone()
        own[index] += self.alpha * cosine / g
        towards[index] -= self.alpha / size
        value = distance.value - self.alpha * cosine
        norm = distance.norm + self.alpha * g.rsqrt()  # a bound: it only sets a step size
        return Distance(value, own, towards, norm, distance.gradients, distance.extra)


ObjectiveName = Literal["l2", "layer_l2", "relative_l2", "cosine", "layer_cosine", "tag"]


def objective_of(name: ObjectiveName) -> Objective:
    """An objective by the name it has in specs."""
    table: dict[str, Objective] = {
        "l2": SquaredL2(),
        "layer_l2": LayerL2(),
        "relative_l2": LayerL2(relative=True),
        "cosine": Cosine(),
        "layer_cosine": LayerCosine(),
        "tag": Tag(0.01),
    }
    return table[name]


def _rounding(like: Tensor) -> float:
    """A smaller 1 - cos^2 than this is rounding."""
    return float(torch.finfo(like.dtype).eps)


def along(values: Tensor, like: Tensor) -> Tensor:
    """Values (S,) shaped to multiply a tensor (S, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _by_seed(layer: Tensor) -> Tensor:
    """A layer (S, ...) as rows (S, N); a temperature, for one, is a single number of no shape."""
    return layer.reshape(len(layer), -1)


def _residuals(gradients: Sequence[Tensor], target: Target) -> Tensor:
    """|g_l - t_l|^2 by layer and seed, (L, S); never as a difference of large numbers."""
    pairs = zip(gradients, target.flat, strict=True)
    return torch.stack(
        [torch.linalg.vector_norm(_by_seed(g) - t, dim=1) for g, t in pairs]
    ).square()


def _squares_and_dots(gradients: Sequence[Tensor], target: Target) -> tuple[Tensor, Tensor]:
    """|g_l|^2 and <g_l, t_l> by layer and seed, (L, S), both while a layer is in the cache."""
    norms, dots = [], []
    for gradient, wanted in zip(gradients, target.flat, strict=True):
        flat = _by_seed(gradient)
        norms.append(torch.linalg.vector_norm(flat, dim=1))
        dots.append(flat @ wanted)
    return torch.stack(norms).square(), torch.stack(dots)
