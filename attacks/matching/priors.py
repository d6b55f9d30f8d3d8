"""Priors: what natural images look like, as penalties on normalised images (S, B, 3, H, W).

Each gives one number per seed, (S,). Formulas that the papers write with a norm are norms over one
seed's whole batch; means are over all its pixels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.matching.registration import align
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Statistics
from fedsim.core.learning import Colour, Update
from fedsim.core.models import batchnorm_names


@dataclass(frozen=True)
class Term:
    """A prior with its weight, and the share of the steps after which it counts."""

    name: str
    weight: float
    penalty: Callable[[Tensor, float], Tensor]  # images, share of the steps done -> (S,)
    since: float = 0.0

    def active(self, done: float) -> bool:
        return self.weight > 0 and done >= self.since


@runtime_checkable
class Stateful(Protocol):
    """A prior that remembers something from step to step."""

    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: Mapping[str, Tensor]) -> None: ...


def total_variation(images: Tensor, done: float = 0.0) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs()
    return down.flatten(1).mean(1) + across.flatten(1).mean(1)


def total_variation_norm(images: Tensor, done: float = 0.0) -> Tensor:
    """The l2 norms of the differences down, across and along both diagonals: the total variation of
    DeepInversion, which GradInversion and GradViT take over."""
    pairs = [
        (images[..., :, :-1], images[..., :, 1:]),
        (images[..., :-1, :], images[..., 1:, :]),
        (images[..., :-1, :-1], images[..., 1:, 1:]),
        (images[..., 1:, :-1], images[..., :-1, 1:]),
    ]
    return torch.stack([_norm(a - b) for a, b in pairs]).sum(0)


def l2_norm(images: Tensor, done: float = 0.0) -> Tensor:
    """|x|_2 of the batch."""
    return _norm(images)


@dataclass(frozen=True)
class PatchPrior:
    """GradViT Eq. 8: norms of the jumps across the borders of neighbouring patches.

    ``mean`` takes the mean absolute jump instead, whose scale does not depend on the size.
    """

    patch_size: tuple[int, int]
    mean: bool = False

    def __call__(self, images: Tensor, done: float = 0.0) -> Tensor:
        rows, columns = self.patch_size
        down = images[..., rows::rows, :] - images[..., rows - 1 : -1 : rows, :]
        across = images[..., :, columns::columns] - images[..., :, columns - 1 : -1 : columns]
        if self.mean:
            return down.abs().flatten(1).mean(1) + across.abs().flatten(1).mean(1)
        borders = [_norm(down[..., k, :]) for k in range(down.shape[-2])]
        borders += [_norm(across[..., k]) for k in range(across.shape[-1])]
        return torch.stack(borders).sum(0)


@dataclass
class GroupConsistency:
    """GradInversion Eq. 11: the distance of every seed to the consensus of all.

    The lazy consensus is the pixel-wise mean. The registered one (Eq. 12) first moves each image
    onto that mean by a translation found with phase correlation, wherever this brings it closer,
    and is renewed now and then from a quarter of the steps on.
    """

    registered: bool = False
    start: float = 0.25
    renewals: int = 20
    _consensus: Tensor | None = field(default=None, init=False, repr=False)
    _renewed: float = field(default=-1.0, init=False, repr=False)

    def __call__(self, images: Tensor, done: float = 0.0) -> Tensor:
        if len(images) < 2:
            return images.new_zeros(len(images))
        consensus = images.detach().mean(0)
        if self.registered and done >= self.start:
            if self._consensus is None or done - self._renewed >= 1 / self.renewals:
                self._consensus, self._renewed = registered_mean(images.detach()), done
            consensus = self._consensus
        return _norm(images - consensus)

    def state(self) -> dict[str, Tensor]:
        if self._consensus is None:
            return {}
        return {"consensus": self._consensus, "renewed": torch.tensor(self._renewed).double()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if "consensus" in state:
            self._consensus, self._renewed = state["consensus"], float(state["renewed"])


def registered_mean(images: Tensor) -> Tensor:
    """The mean over seeds (S, B, ...) after each image was moved onto the plain mean."""
    mean = images.mean(0)
    moved = torch.stack(
        [torch.stack([align(image, mean[b])[0] for b, image in enumerate(seed)]) for seed in images]
    )
    return moved.mean(0)


@dataclass
class FeaturePrior:
    """BatchNorm statistics of a network's features (GradInversion Eq. 10, GradViT Eq. 4):

    sum_l |mean_l(x) - mean_l|_2 + |var_l(x) - var_l|_2, the first layer ``first`` times.

    While it listens, hooks on the network's BatchNorm layers collect the terms.
    """

    statistics: Statistics
    weight: float = 1.0
    first: float = 1.0
    _terms: list[Tensor] = field(default_factory=list, init=False, repr=False)

    @contextlib.contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        self._terms = []
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(self._hook(index, mean, variance))
            for index, (name, (mean, variance)) in enumerate(self.statistics.items())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(
        self, index: int, mean: Tensor, variance: Tensor
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        scale = self.first if index == 0 else 1.0

        def collect(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].transpose(0, 1).flatten(1)  # (C, all positions)
            off = _distance(values.mean(1), mean) + _distance(values.var(1), variance)
            self._terms.append(scale * off)

        return collect

    def penalty(self) -> Tensor:
        """The weighted sum of what was collected."""
        return self.weight * torch.stack(self._terms).sum()


@dataclass
class PriorNetwork:
    """GradViT Eq. 4: a network trained on natural images, and how it sees ours.

    ``mean`` and ``std`` are our normalisation, ``own_mean`` and ``own_std`` the network's; smaller
    images are enlarged to the side ``size``.
    """

    model: nn.Module
    mean: Colour
    std: Colour
    own_mean: Colour
    own_std: Colour
    size: int = 64

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.features = FeaturePrior(running_statistics(self.model))
        if not self.features.statistics:
            raise AttackError("a prior network needs BatchNorm layers; this one has none.")

    def __call__(self, images: Tensor, done: float = 0.0) -> Tensor:
        return torch.stack([self._one(seed) for seed in images])

    def _one(self, images: Tensor) -> Tensor:
        pixels = images * _colour(self.std, images) + _colour(self.mean, images)
        inputs = (pixels - _colour(self.own_mean, images)) / _colour(self.own_std, images)
        if inputs.shape[-1] < self.size:
            inputs = F.interpolate(inputs, size=self.size, mode="bilinear", antialias=False)
        with self.features.listening(self.model):
            self.model(inputs)
            return self.features.penalty()


def running_statistics(model: nn.Module) -> Statistics:
    """What the BatchNorm layers of ``model`` remember of their training: an approximation."""
    statistics = {}
    for name in batchnorm_names(model):
        layer = model.get_submodule(name)
        mean, variance = layer.running_mean, layer.running_var
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            statistics[name] = (mean.detach().clone(), variance.detach().clone())
    return statistics


def batch_statistics(model: nn.Module, update: Update) -> Statistics:
    """The statistics of the client's own batch, from the running ones it uploaded.

    One step moves them by  new = (1 - m) old + m batch, so the batch's follow exactly. Their
    counter says whether it was one step; after none or several nothing can be told.
    """
    statistics = {}
    for name, (mean, variance) in running_statistics(model).items():
        layer = model.get_submodule(name)
        momentum, count = getattr(layer, "momentum", None), getattr(layer, "num_batches_tracked", 0)
        keys = [f"{name}.{key}" for key in ("running_mean", "running_var", "num_batches_tracked")]
        if not momentum or any(key not in update.buffers for key in keys):
            return {}
        new_mean, new_variance, new_count = (update.buffers[key].to(mean.device) for key in keys)
        if int(new_count) - int(count) != 1:
            return {}
        statistics[name] = (
            (new_mean - (1 - momentum) * mean) / momentum,
            ((new_variance - (1 - momentum) * variance) / momentum).clamp(min=0),
        )
    return statistics


def to_device(statistics: Mapping[str, tuple[Tensor, Tensor]], device: torch.device) -> Statistics:
    return {name: (m.to(device), v.to(device)) for name, (m, v) in statistics.items()}


def _norm(values: Tensor) -> Tensor:
    """l2 norm by seed, with a derivative of zero at zero."""
    return (values.flatten(1).square().sum(1) + 1e-16).sqrt()


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b.to(a.dtype)).square().sum() + 1e-16).sqrt()


def _colour(colour: Colour, like: Tensor) -> Tensor:
    return torch.tensor(colour, dtype=like.dtype, device=like.device).view(3, 1, 1)
