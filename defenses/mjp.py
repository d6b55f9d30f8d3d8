"""Masked jigsaw puzzle (Liu et al. 2022): part of the patches shuffled, their positions unknown.

A block-wise mask picks patches, which change places among themselves; at their places the model
adds one shared, learned embedding that says "unknown" instead of the position (their Eq. 6). The
positions that remain are kept meaningful by dense absolute localisation: a head must read the
coordinates of a patch from its position embedding (their Eq. 4). On networks without patches, or
without a position embedding of their own (a Swin, whose positions are relative), only the shuffling
is left.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.core.anatomy import VitParts, batchnorm_names, found_in, tensor_of, vit_parts
from fedsim.core.defense import Defense, Informed
from fedsim.core.errors import ModelError
from fedsim.core.spec import Upload
from fedsim.defenses.jigsaw import block_mask, rearrange, scramble_pixels, shuffled_order

if TYPE_CHECKING:
    from fedsim.core.learning import Update

_CONVOLUTIONAL_GRID = 8  # patches per side, for networks that have none of their own
_ALIKE = 0.9  # the least cosine at which the head's update is its gradient, but for scale and noise
UNKNOWN, INDEX, HEAD = "unk_embed", "index_embed", "dal_head"


@dataclass
class Puzzle:
    """The grid of patches of an MJP client's model, and the mask of the batch at hand."""

    grid: tuple[int, int]
    mask: Tensor | None = None  # (N,), while it learns from a shuffled batch
    order: Tensor | None = None  # (N,), which patch stands at each place then
    hide: bool = True  # whether the unknown embedding stands for masked positions
    position: str = ""  # the name of the position embedding
    adds: str = ""  # the method of the model during which it is added


@dataclass(frozen=True)
class Mjp(Defense):
    """``ratio`` of the patches, with ``probability`` per batch (the authors': 0.5), from round
    ``warmup`` + 1 on. ``dal``: the head of the localisation, with ``weight`` in the loss; it must
    tell a patch's row and column as they are counted (0 to K - 1): the larger the grid, the further
    apart the embeddings are pulled. ``mlp`` is the paper's head of three layers, ``mlp2`` has two.

    The paper's variants: ``positions`` False removes the position embedding (B of its Table 2),
    ``pixels`` also scrambles the pixels inside all patches (C), ``probability`` 0 and ``unknown``
    False leave the localisation alone (D), ``unknown`` False leaves the positions of shuffled
    patches in place (E), ``index`` adds to every patch an embedding of where it came from (F);
    ``hide`` False keeps the positions of shuffled patches although the network has learned an
    unknown embedding (its Table 5c). The ratio is that of the paper's main model.
    """

    ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    warmup: Annotated[int, Field(ge=0)] = 0
    dal: Literal["none", "pca", "linear", "mlp2", "mlp"] = "mlp"
    weight: Annotated[float, Field(ge=0)] = 0.01
    unknown: bool = True
    index: bool = False
    pixels: bool = False
    positions: bool = True
    hide: bool = True

    def at_round(self, round_: int, client: int, cohort: Sequence[int]) -> Mjp:
        return replace(self, probability=0.0) if round_ <= self.warmup else self

    def prepare_model(self, model: nn.Module) -> nn.Module:
        try:
            parts = vit_parts(model)
        except ModelError as error:
            if not batchnorm_names(model):
                raise ModelError(f"mjp finds no patches to shuffle: {error}") from error
            object.__setattr__(model, "puzzle", Puzzle((_CONVOLUTIONAL_GRID,) * 2))
            return model
        object.__setattr__(model, "puzzle", Puzzle(parts.grid, hide=self.hide))
        if parts.position is None:
            return model
        if not parts.is_plain(tensor_of(model, parts.position)):
            raise ModelError(
                "mjp needs a table of positions that ends with those of the patches; here others "
                "follow, or they do not lie in rows."
            )
        own = "forward" if found_in(model) is not None else "_pos_embed"
        if not hasattr(model, own):
            raise ModelError("mjp finds a position embedding, and not where the model adds it.")
        self._add_embeddings(model, parts)
        puzzle_of(model).position = parts.position
        puzzle_of(model).adds = own
        object.__setattr__(model, own, types.MethodType(_positions, model))
        return model

    def _add_embeddings(self, model: nn.Module, parts: VitParts) -> None:
        assert parts.position is not None
        position = tensor_of(model, parts.position)
        width = position.shape[-1]
        if not self.positions:
            with torch.no_grad():
                position.zero_()
            position.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.unknown and self.positions:  # as large as the positions, as the authors' is
                scale = float(position.detach().float().std())
                unknown = scale * torch.randn(1, 1, width)
                model.register_parameter(UNKNOWN, nn.Parameter(unknown))
            if self.index:
                model.register_parameter(INDEX, nn.Parameter(torch.zeros(1, parts.tokens, width)))
            if self.dal in ("linear", "mlp2", "mlp") and self.weight > 0 and self.positions:
                model.add_module(HEAD, _head(width, self.dal))

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        puzzle = puzzle_of(model)
        puzzle.mask = puzzle.order = None
        if float(torch.rand((), generator=rng)) >= self.probability:
            return images, labels
        mask = block_mask(puzzle.grid, self.ratio, rng)
        order = shuffled_order(mask, rng)
        images = rearrange(images, puzzle.grid, order)
        if self.pixels:
            images = scramble_pixels(images, puzzle.grid, torch.ones_like(mask), rng)
        puzzle.mask, puzzle.order = mask.to(images.device), order.to(images.device)
        return images, labels

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Dense absolute localisation: L1 to the grid coordinates, over the unmasked positions."""
        if self.dal == "none" or self.weight == 0 or not self.positions:
            return None
        try:
            parts = vit_parts(model)
        except ModelError:
            return None
        if parts.position is None:
            return None
        position = tensor_of(model, parts.position)
        rows = position.reshape(-1, position.shape[-1])[parts.prefix_tokens :]
        truth = coordinates(parts.grid).to(rows)
        puzzle = puzzle_of(model)
        if puzzle.mask is not None:
            rows, truth = rows[~puzzle.mask], truth[~puzzle.mask]
        if len(rows) < 3:
            return None
        return self.weight * (self._localised(model, rows) - truth).abs().sum(1).mean()

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Shuffled places have position gradients of exactly zero, but for what the localisation
        adds, which does not depend on the data: read the mask, compute that and subtract it. Where
        an index embedding took the same gradients in another order, the order is read as well."""
        try:
            parts = vit_parts(model)
        except ModelError:
            return seen
        tensors, position = seen.update.tensors, parts.position
        if position is None or position not in tensors:
            return seen
        puzzle = puzzle_of(model)
        puzzle.order = None
        rows = _rows(tensors[position], parts)
        puzzle.mask, words = self._read_mask(rows, tensors)
        undo = seen.undo
        if self.index and INDEX in tensors and not self.unknown:
            told = self._localisation_gradient(model).get(position)
            own = torch.zeros_like(rows) if told is None else _rows(told, parts)
            index = _rows(tensors[INDEX], parts)
            puzzle.order, puzzle.mask = _read_order(rows, index, own.to(rows))
            words = f"the order of all patches ({int(puzzle.mask.sum())} moved) read from `index`"
            undo = partial(rearrange, grid=puzzle.grid, order=puzzle.order.argsort())
        puzzle.mask, puzzle.order = (
            places if places is None else places.to(tensor_of(model, position).device)
            for places in (puzzle.mask, puzzle.order)
        )
        tensors, notes = self._without_localisation(seen.update, model, puzzle)
        update = replace(seen.update, tensors=tensors)
        return replace(seen, update=update, undo=undo, notes=(*seen.notes, f"mjp: {words}", *notes))

    def _read_mask(self, rows: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, str]:
        """The places (N,) whose position got no gradient, None where none are known, in words."""
        if self.probability == 0:
            return None, "it never shuffles"
        if not (self.unknown and self.hide) or UNKNOWN not in tensors:
            return None, "whether patches were shuffled cannot be told"
        if not bool(tensors[UNKNOWN].any()):
            return None, "this batch was not shuffled"
        mask = (rows == 0).all(1)
        if not bool(mask.any()):
            return None, "which patches were shuffled cannot be told"
        return mask, f"the mask ({int(mask.sum())} of {len(mask)} patches) read from zero rows"

    def _without_localisation(
        self, update: Update, model: nn.Module, puzzle: Puzzle
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The update without what the localisation alone added to it. Nothing else touches its
        head, whose gradient so tells its scale: a client that clips, or one step of a delta."""
        tensors, gradient = dict(update.tensors), self._localisation_gradient(model)
        if not gradient:
            return tensors, []
        head = [name for name in gradient if name.startswith(f"{HEAD}.") and name in tensors]
        scale: float | None = 1.0 if update.kind is Upload.GRADIENT else None
        if head:
            own = torch.cat([gradient[name].flatten() for name in head]).double()
            seen = torch.cat([tensors[name].flatten() for name in head]).to(own)
            own = own * (seen != 0)  # what was not uploaded says nothing
            alike = float(own @ seen / (own.norm() * seen.norm()).clamp(min=1e-30))
            one = abs(alike) >= _ALIKE and (alike > 0) == (update.kind is Upload.GRADIENT)
            scale = float(own @ seen / (own @ own)) if one else None
        if scale is None:
            return tensors, ["mjp: its localisation is left in, whose scale cannot be told"]
        for name, own in gradient.items():
            if name in tensors:
                seen = tensors[name]
                tensors[name] = torch.where(seen == 0, seen, seen - scale * own.to(seen))
        return tensors, []

    def _localisation_gradient(self, model: nn.Module) -> dict[str, Tensor]:
        """What the localisation alone adds to the gradient."""
        penalty = self.penalty(model)
        if penalty is None:
            return {}
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(penalty, list(trained.values()), allow_unused=True)
        return {n: g for n, g in zip(trained, gradients, strict=True) if g is not None}

    def _localised(self, model: nn.Module, rows: Tensor) -> Tensor:
        if self.dal == "pca":
            # The directions are found without a gradient; what is learned is the projection.
            centred = rows - rows.mean(0)
            with torch.no_grad():
                _, _, directions = torch.linalg.svd(centred, full_matrices=False)
            projected = centred @ directions[:2].T
            spread = projected.detach().abs().max().clamp(min=1e-8)
            far = torch.tensor(puzzle_of(model).grid).to(rows) - 1
            return far * (0.5 + projected / spread / 2)
        estimate: Tensor = model.get_submodule(HEAD)(rows)
        return estimate


def _positions(self: Any, *given: Any, **named: Any) -> Any:
    """What the model does as it adds its positions, with those of a shuffled batch."""
    puzzle: Puzzle = self.puzzle
    original, mask, order = getattr(type(self), puzzle.adds), puzzle.mask, puzzle.order
    if mask is None and INDEX not in self._parameters:
        return original(self, *given, **named)
    place, _, last = puzzle.position.rpartition(".")
    owner = self.get_submodule(place)
    held = owner._parameters if last in owner._parameters else owner._buffers
    embedding = held[last]
    table = embedding.reshape(-1, embedding.shape[-1])
    rows = table[-math.prod(puzzle.grid) :]
    if mask is not None and puzzle.hide and UNKNOWN in self._parameters:
        rows = torch.where(mask[:, None], self._parameters[UNKNOWN][0], rows)
    if INDEX in self._parameters:
        index = self._parameters[INDEX][0]
        rows = rows + (index if order is None else index[order])
    held[last] = torch.cat([table[: -len(rows)], rows]).view_as(embedding)
    try:
        return original(self, *given, **named)
    finally:
        held[last] = embedding


def _rows(gradient: Tensor, parts: VitParts) -> Tensor:
    """What the patches' embeddings got, (N, D)."""
    return gradient.reshape(-1, gradient.shape[-1])[-parts.tokens :]


def _read_order(positions: Tensor, index: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
    """Which patch stood at each place, (N,): its row of ``index`` got what the place's row got, but
    for the localisation's share, along ``told``, which only places outside the mask have; and the
    mask, (N,)."""
    positions, index, told = positions.double(), index.double(), told.double()
    apart = torch.cdist(positions, index)
    rest = positions - index
    along = (rest * told).sum(1) / told.square().sum(1).clamp(min=1e-30)
    stayed = (rest - along[:, None] * told).norm(dim=1)
    apart.diagonal().copy_(torch.minimum(apart.diagonal(), stayed))
    _, columns = linear_sum_assignment(apart.cpu().numpy())
    order = torch.as_tensor(columns, device=positions.device)
    mask = order != torch.arange(len(order), device=order.device)
    if bool(told.any()) and bool((~mask).any()):  # one of the mask may have come to its own place
        sizes = rest.norm(dim=1)
        mask |= sizes < 1e-2 * sizes[~mask].max()
    return order, mask


def puzzle_of(model: nn.Module) -> Puzzle:
    """The state that `Mjp.prepare_model` gave the model."""
    puzzle: Puzzle = vars(model)["puzzle"]
    return puzzle


def coordinates(grid: tuple[int, int]) -> Tensor:
    """Row and column of every patch, counted from 0, (N, 2)."""
    axes = [torch.arange(n, dtype=torch.float32) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)


def _head(width: int, kind: str) -> nn.Module:
    if kind == "linear":
        return nn.Linear(width, 2)
    hidden = [nn.Linear(width, width), nn.GELU()]
    if kind == "mlp":
        hidden += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(width, 2))
