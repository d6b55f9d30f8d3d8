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
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.matching.presets import PresetName
from fedsim.attacks.matching.registration import align
from fedsim.core.anatomy import batchnorm_names, feature_statistics
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Statistics
from fedsim.core.learning import Colour, Update


@dataclass(frozen=True)
class Term:
    """A prior with its weight, and the share of the steps after which it counts."""

    name: str
    weight: float
    penalty: Callable[[Tensor, float], Tensor]  # images, share of the steps done -> (S,)
    since: float = 0.0

    def active(self, done: float) -> bool:
        return self.weight > 0 and done >= self.since

    def phase(self, done: float) -> int:
        """How often the term has changed by then: as it began, and where it became another one."""
        if not self.active(done):
            return 0
        return 1 + (self.penalty.phase(done) if isinstance(self.penalty, Phased) else 0)


@runtime_checkable
class Phased(Protocol):
    """A prior that becomes another one on the way."""

    def phase(self, done: float) -> int: ...


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


def total_variation_of(preset: PresetName) -> Callable[[Tensor, float], Tensor]:
    """The total variation that a preset's weights are meant for."""
    return total_variation if preset == "cpu" else total_variation_norm


def l2_norm(images: Tensor, done: float = 0.0) -> Tensor:
    """The mean of the pictures' l2 norms, as in the code of DeepInversion, to which GradInversion
    and GradViT refer."""
    norms = (images.flatten(2).square().sum(2) + 1e-16).sqrt()  # (S, B)
    return norms.mean(1)


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

    Where a label repeats, seeds hold its pictures in different slots: they are matched to those of
    the first seed before anything is averaged (``labels``, (B,); slots of one label may change
    places, and all of them where no labels are given). The lazy consensus is the pixel-wise mean.
    The registered one (Eq. 12) first moves each image onto that mean by a translation found with
    phase correlation, wherever this brings it closer. Match and registration are renewed every
    ``every`` steps' share of the search, the registration from the share ``start`` on.
    """

    registered: bool = False
    labels: Tensor | None = None
    start: float = 0.25
    every: float = 0.05
    _order: Tensor | None = field(default=None, init=False, repr=False)
    _matched: float = field(default=-1.0, init=False, repr=False)
    _consensus: Tensor | None = field(default=None, init=False, repr=False)
    _renewed: float = field(default=-1.0, init=False, repr=False)

    def __call__(self, images: Tensor, done: float = 0.0) -> Tensor:
        if len(images) < 2:
            return images.new_zeros(len(images))
        every = self.every - 1e-9  # shares of the steps are not exact
        if self._order is None or done - self._matched >= every:
            self._order, self._matched = slots_matched(images.detach(), self.labels), done
        seeds = torch.arange(len(images), device=images.device)[:, None]
        images = images[seeds, self._order.to(images.device)]
        consensus = images.detach().mean(0)
        if self.registered and done >= self.start:
            if self._consensus is None or done - self._renewed >= every:
                self._consensus, self._renewed = registered_mean(images.detach()), done
            consensus = self._consensus
        return _norm(images - consensus)

    def phase(self, done: float) -> int:
        return int(self.registered and done >= self.start)

    def state(self) -> dict[str, Tensor]:
        state = {}
        if self._order is not None:
            state["order"] = self._order
            state["matched"] = torch.tensor(self._matched).double()
        if self._consensus is not None:
            state["consensus"] = self._consensus
            state["renewed"] = torch.tensor(self._renewed).double()
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if "order" in state:
            self._order, self._matched = state["order"], float(state["matched"])
        if "consensus" in state:
            self._consensus, self._renewed = state["consensus"], float(state["renewed"])


def slots_matched(images: Tensor, labels: Tensor | None = None) -> Tensor:
    """Which slot of every seed holds the picture of each slot of the first seed, (S, B), by least
    squared distance; only slots of the same label (B,) change places."""
    seeds, batch = images.shape[:2]
    order = torch.arange(batch).repeat(seeds, 1)
    groups = [torch.arange(batch)]
    if labels is not None:
        groups = [(labels.cpu() == label).nonzero()[:, 0] for label in labels.cpu().unique()]
    flat = images.detach().flatten(2)
    for group in groups:
        if len(group) < 2:
            continue
        first = flat[0, group.to(flat.device)]
        for seed in range(1, seeds):
            apart = torch.cdist(first[None], flat[seed, group.to(flat.device)][None])[0].square()
            if not bool(torch.isfinite(apart).all()):
                continue
            _, columns = linear_sum_assignment(apart.cpu().numpy())
            order[seed, group] = group[torch.as_tensor(columns)]
    return order


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

    sum_l |mean_l(x) - mean_l|_2 + |var_l(x) - var_l|_2, the first layer ``first`` times, each layer
    divided by its ``units``.

    While it listens, hooks on the network's BatchNorm layers collect the terms.
    """

    statistics: Statistics
    weight: float = 1.0
    first: float = 1.0
    units: tuple[float, ...] = ()  # one per layer, in their order; none: as the papers write it
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
        scale = (self.first if index == 0 else 1.0) / (self.units[index] if self.units else 1.0)

        def collect(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen_mean, seen_variance = feature_statistics(inputs[0])
            off = _distance(seen_mean, mean) + _distance(seen_variance, variance)
            self._terms.append(scale * off)

        return collect

    def penalty(self) -> Tensor:
        """The weighted sum of what was collected."""
        return self.weight * torch.stack(self._terms).sum()

    def by_layer(self) -> Tensor:
        """What was collected, a number per layer (L,)."""
        return torch.stack(self._terms)


@dataclass
class PriorNetwork:
    """GradViT Eq. 4: a network trained on natural images, and how it sees ours.

    Layers differ by orders of magnitude, and networks as well: each layer's distance is divided by
    what batches of ``natural`` pictures (N, 3, H, W) in [0, 1] have there, and the layers are
    averaged. So natural pictures score about 1, and a coefficient means the same for any network.
    With ``scaled`` False they are summed as they come, as the paper has it.

    ``mean`` and ``std`` are our normalisation, ``own_mean`` and ``own_std`` the network's; smaller
    images are enlarged to the side ``size``; ``batch``: how many pictures are searched, because the
    statistics of few stray further.
    """

    model: nn.Module
    mean: Colour
    std: Colour
    own_mean: Colour
    own_std: Colour
    natural: Tensor
    size: int = 64
    batch: int = 8
    scaled: bool = True

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.features = FeaturePrior(running_statistics(self.model))
        if not self.features.statistics:
            raise AttackError("a prior network needs BatchNorm layers; this one has none.")
        if self.scaled:
            layers = self._natural_distances()
            self.features.units = tuple((layers * len(layers)).tolist())

    def __call__(self, images: Tensor, done: float = 0.0) -> Tensor:
        return torch.stack([self._one(seed).sum() for seed in images])

    @torch.no_grad()
    def _natural_distances(self) -> Tensor:
        """The mean distance of batches of natural pictures, layer by layer, (L,)."""
        like = next(self.model.parameters())
        batches = self.natural.to(like).split(min(self.batch, len(self.natural)))
        seen = [(some - _colour(self.mean, like)) / _colour(self.std, like) for some in batches]
        return torch.stack([self._one(batch) for batch in seen]).mean(0).clamp(min=1e-12)

    def _one(self, images: Tensor) -> Tensor:
        """The distance of one batch, layer by layer, (L,)."""
        pixels = images * _colour(self.std, images) + _colour(self.mean, images)
        inputs = (pixels - _colour(self.own_mean, images)) / _colour(self.own_std, images)
        if inputs.shape[-1] < self.size:
            inputs = F.interpolate(inputs, size=self.size, mode="bilinear", antialias=False)
        with self.features.listening(self.model):
            self.model(inputs)
            return self.features.by_layer()


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
