"""WeightCheck: do the received weights look like weights that training makes?

What an active server sends carries marks that neither initialisation nor training leaves: rows of
zeros, rows of one direction, a class whose bias stands apart, blocks that are silent while others
are not, tensors that moved further than rounds move them. It needs the weights alone, no picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.anatomy import batchnorm_names, head_names, vit_parts
from fedsim.core.errors import ModelError
from fedsim.core.guard import Finding, Guard, Scene
from fedsim.defenses.guards import calibration
from fedsim.defenses.guards.sketches import moved, norms_of, sketch_of

ZERO = 1e-6  # of the largest row: a row that is none
TWIN = 1 - 1e-4  # the cosine of two rows from which on they are one direction
NARROW = 16  # rows of fewer numbers are often alike by chance
LOOKS = 4  # directions along which rows are sorted to find twins
POWER_STEPS = 8
STILL = 1e-4  # by its size: what a tensor that nobody trains may move, by rounding
SILENT = 1e-3  # the size of a matrix that is quiet already, and may become quieter

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Mark:
    """One thing that was checked: how far it is along to its limit, and what it is."""

    ratio: float
    words: str


@dataclass(frozen=True, kw_only=True)
class WeightCheck(Guard):
    """The score is the worst check's share of its own limit, so its limit is 1.

    ``twins``: the share of a layer's rows that may have a twin (half of the rows, in the head);
    ``one_direction``: the share of a layer's rows, in squares, that one direction may explain;
    ``dead_filters``: the share of a convolution's filters that may be zero, as training with weight
    decay leaves them; ``bias_gap``: between the head's largest and smallest bias; ``row_norms``: of
    the head, the largest by the median; ``blocks``: between tensors of one name and shape in
    different blocks, the larger size by the smaller; ``moved``: how far a tensor may move between
    two rounds of a client, by its own size; ``shrunk``: to which part of its size it may fall.

    ``zero_start``: the model may begin with whole matrices of zeros, as the heads of mixers do;
    then they are no sign in the first round. A federation that knows better says so. What is not
    trained may not move at all. Of the last round that no guard spoke up in, the more rounds ago it
    was, the further tensors may have moved.
    """

    twins: Positive = calibration.TWINS
    one_direction: Positive = calibration.ONE_DIRECTION
    dead_filters: Positive = calibration.DEAD_FILTERS
    bias_gap: Positive = calibration.BIAS_GAP
    row_norms: Positive = calibration.ROW_NORMS
    blocks: Positive = calibration.BLOCKS
    moved: Positive = calibration.MOVED
    shrunk: Positive = calibration.SHRUNK
    zero_start: bool = True

    def inspect(self, scene: Scene) -> Finding:
        worst = max(self.marks(scene), key=lambda mark: mark.ratio, default=Mark(0.0, "no weights"))
        return Finding("weight_check", worst.ratio, 1.0, worst.words)

    def keep(self, scene: Scene) -> dict[str, Tensor]:
        tensors = _weights(scene.model)
        return {
            "weight_check/norms": norms_of(tensors),
            "weight_check/sketch": sketch_of(tensors),
            "weight_check/round": torch.tensor(scene.round),
        }

    @torch.no_grad()
    def marks(self, scene: Scene) -> Iterator[Mark]:
        """Every check of every tensor."""
        tensors = _weights(scene.model)
        broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        if broken:
            yield Mark(float("inf"), f"'{broken[0]}' holds what is no number")
            return
        yield from self._rows(scene, tensors)
        yield from self._head(scene.model, tensors)
        yield from self._blocks(tensors)
        yield from self._moves(scene, tensors)

    def _rows(self, scene: Scene, tensors: dict[str, Tensor]) -> Iterator[Mark]:
        head, strict = _named_head(scene.model), _without_dead_rows(scene.model)
        sparse = _grouped(scene.model)
        for name, matrix in _matrices(scene.model, tensors):
            norms = matrix.norm(dim=1)
            largest = norms.max()
            if largest == 0:
                started = self.zero_start and _may_be_zero(scene, tensors, name)
                yield Mark(0.0 if started else float("inf"), f"'{name}' is all zeros")
                continue
            dead = norms <= ZERO * largest
            zeros = int(dead.sum())
            allowed = 0.5 if name in strict else self.dead_filters * len(matrix)
            yield Mark(zeros / allowed, f"{zeros} of {len(matrix)} rows of '{name}' are zero")
            if name in sparse or matrix.shape[1] < NARROW or len(matrix) - zeros < 3:
                continue
            rows = matrix[~dead] / norms[~dead, None]
            share = twins(rows)
            words = f"{share:.0%} of the rows of '{name}' have a twin"
            yield Mark(share / (max(0.5, self.twins) if name in head else self.twins), words)
            if name not in head:
                share = one_direction(rows)
                words = f"one direction explains {share:.0%} of the rows of '{name}'"
                yield Mark(share / self.one_direction, words)

    def _head(self, model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[Mark]:
        for name in _named_head(model):
            if name not in tensors:
                continue
            tensor = tensors[name]
            if tensor.ndim == 1:
                gap = float(tensor.max() - tensor.min())
                yield Mark(gap / self.bias_gap, f"the biases '{name}' are {gap:.3g} apart")
            elif len(tensor) > 2:  # of two rows, the larger is the median's double at most
                norms = tensor.norm(dim=1)
                median = norms.median().clamp(min=ZERO * float(norms.max()))
                ratio = float(norms.max() / median) if norms.max() > 0 else 0.0
                words = f"a row of '{name}' is {ratio:.3g} times the median one"
                yield Mark(ratio / self.row_norms, words)

    def _blocks(self, tensors: dict[str, Tensor]) -> Iterator[Mark]:
        """Blocks begin alike and are trained alike: one that is silent, or shouts, was made so."""
        alike: dict[tuple[str, torch.Size], dict[str, float]] = {}
        for name, tensor in tensors.items():
            if name.endswith("weight"):
                kind = (re.sub(r"\.\d+\.", ".*.", name), tensor.shape)
                alike.setdefault(kind, {})[name] = _size(tensor)
        for sizes in alike.values():
            small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            if sizes[large] > 0:
                ratio = sizes[large] / max(sizes[small], 1e-12 * sizes[large])
                words = f"'{large}' is {ratio:.3g} times as large as '{small}'"
                yield Mark(ratio / self.blocks, words)

    def _moves(self, scene: Scene, tensors: dict[str, Tensor]) -> Iterator[Mark]:
        sketch, norms = (scene.kept.get(f"weight_check/{part}") for part in ("sketch", "norms"))
        if sketch is None or norms is None or len(norms) != len(tensors):
            return
        shifts, frozen = moved(tensors, sketch), _frozen(scene.model)
        normalised = _normalised(scene.model)
        since = scene.round - int(scene.kept.get("weight_check/round", torch.tensor(scene.round)))
        allowed = self.moved * max(
            1, since
        )  # a client that was not asked for rounds meets them all
        for (name, tensor), shift, norm in zip(tensors.items(), shifts, norms, strict=True):
            count = tensor.numel() ** 0.5
            was, is_ = float(norm) / count, _size(tensor)
            if name in frozen:
                ratio = float(shift) / max(float(norm), 1e-12) / STILL
                yield Mark(ratio, f"'{name}' moved, which nobody trains")
                continue
            ratio = float(shift) / count / (was + calibration.SMALL)
            if name not in normalised:
                yield Mark(ratio / allowed, f"'{name}' moved by {ratio:.3g} times its size")
            if was > SILENT and tensor.ndim > 1:
                part = is_ / was
                words = f"'{name}' fell to {part:.2g} of its size"
                yield Mark(self.shrunk / max(part, 1e-12), words)


def _may_be_zero(scene: Scene, tensors: dict[str, Tensor], name: str) -> bool:
    """Whether a matrix of zeros is no news: nothing was met before. Zeros that were met before are
    news, because a round of training moves them; not those that nobody trains."""
    norms = scene.kept.get("weight_check/norms")
    if norms is None or len(norms) != len(tensors):
        return True
    return name in _frozen(scene.model) and float(norms[list(tensors).index(name)]) == 0


def twins(rows: Tensor) -> float:
    """The share of unit rows (N, D) that have one of the same direction, or the opposite, beside
    them when all are sorted along some direction: exact twins always are."""
    coin = torch.Generator().manual_seed(0)
    looks = torch.randn(rows.shape[1], LOOKS, generator=coin).to(rows)
    has_twin = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    for places in (rows @ looks).abs().T:  # of a row and its opposite, the same
        order = places.argsort()
        close = (rows[order[1:]] * rows[order[:-1]]).sum(dim=1).abs() > TWIN
        has_twin[order[1:][close]] = True
        has_twin[order[:-1][close]] = True
    return float(has_twin.float().mean())


def one_direction(rows: Tensor) -> float:
    """The largest share of the unit rows' (N, D) squares that one direction explains."""
    direction = rows.new_ones(rows.shape[1]) + rows[0]  # any that is not orthogonal to the answer
    for _ in range(POWER_STEPS):
        direction = rows.T @ (rows @ direction)
        direction = direction / direction.norm().clamp(min=1e-30)
    return float((rows @ direction).square().mean())


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All of them: a head that nobody trains can fish as well."""
    return {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _normalised(model: nn.Module) -> set[str]:
    """What goes far in honest rounds of networks with BatchNorm: its own parameters, and the
    convolutions, whose size it takes out again (a stem moved by 117 times its size in a round of
    mobilenetv2_050, whose loss hardly changed)."""
    norms = batchnorm_names(model)
    if not norms:
        return set()
    convolutions = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    return convolutions | {f"{name}.{part}" for name in norms for part in ("weight", "bias")}


def _matrices(model: nn.Module, tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """The weights of linear and convolutional layers, a row for every output."""
    for name, module in model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(module, nn.Linear | nn.Conv2d) and weight in tensors:
            matrix = tensors[weight].flatten(1)
            if len(matrix) > 1:
                yield weight, matrix


def _without_dead_rows(model: nn.Module) -> set[str]:
    """Weights in which training leaves no row of zeros: linear layers and the patch projection."""
    names = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    try:
        return names | {vit_parts(model).patch_weight}
    except ModelError:
        return names


def _grouped(model: nn.Module) -> set[str]:
    """Weights of convolutions by groups: training makes depthwise filters alike (one direction
    explains 82 % of a layer of EfficientNet-Lite0's ImageNet weights)."""
    convolutions = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    return {f"{name}.weight" for name, module in convolutions if module.groups > 1}


def _named_head(model: nn.Module) -> list[str]:
    try:
        return head_names(model)
    except ModelError:
        return []


def _size(tensor: Tensor) -> float:
    """The root mean square."""
    return float(tensor.norm()) / max(1, tensor.numel()) ** 0.5
