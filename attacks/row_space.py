"""Row-space solve: one image of a Vision Transformer whose position embedding is frozen.

The first block's attention reads u_t = LN(z_t) of every token, z_t = W x_t + b + E_t, and its
weights' gradient is a sum of outer products with u_t: the row space S of [dW_qkv | db_qkv] is the
span of all (u_t, 1). Multiplied by the token's deviation s_t, membership reads

    (gamma C (W x_t + b + E_t) + s_t beta, s_t)  in  S        (C: centering)

which is linear in (x_t, s_t). The patches x_t themselves lie in the row space of dW. One least
squares with a right-hand side for each patch gives all of them; the position gradient is never
used. It wants known positions E of full rank, and D - 1 >= min(N, P) + N + 2 equations. Where the
attention reads the bare tokens, (z_t, 1) lies in S, and there is no s_t to find; queries, keys and
values of layers of their own are stacked, and without biases the last column is left out.

Where a part of the model is trained, less may do. Without dW the patches are searched among all P
numbers, which wants D - 1 >= P + N + 2. Adapters (LoRA, `closed.adapters`) of rank r on the
attention show r rows of dW_qkv once B is not zero, which span S where r is at least the number of
tokens; while B is zero they show A S, in which (A u_t) must lie: r - T equations for T tokens.
Derived here; related to the subspace attacks on text (DAGER).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.closed import ClosedForm, Solved, fold_patches, uploaded
from fedsim.attacks.closed.adapters import adapter_of, adapter_ranks
from fedsim.attacks.transformers import measured, refuse_zeros, transformer_parts
from fedsim.core.anatomy import FirstAttention, VitParts, tensor_of
from fedsim.core.attack import Progress
from fedsim.core.dissection import Added
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.observation import Public


@dataclass(frozen=True)
class RowSpace(ClosedForm):
    """Solves in float64, from gradients of any precision."""

    def check_model(self, model: nn.Module, public: Public) -> None:
        parts = transformer_parts(model, "row_space")
        _refuse_none(parts)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        refuse_too_little(model, parts, trained, moved=True)

    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        parts = transformer_parts(model, "row_space")
        notes: list[str] = []
        if view.batch_size > 1:
            notes.append(
                f"underdetermined: the tokens of {view.batch_size} images share one row space"
            )
        embedding = _added(model, parts, view.image_size)
        patches, residual = solve(view.update.tensors, model, parts, notes, embedding)
        progress(1, 1, residual)
        return Solved(fold_patches(patches, parts), residual, notes)


@dataclass(frozen=True)
class Size:
    """The size of the system for one patch."""

    equations: int
    unknowns: int

    @property
    def determined(self) -> bool:
        return self.equations >= self.unknowns


def size_of(model: nn.Module, parts: VitParts, trained: Collection[str], *, moved: bool) -> Size:
    """The system that these gradients give; ``moved``: adapters are past their zeros."""
    attention = _attention(model, parts)
    weight = model.get_parameter(parts.patch_weight)
    width, pixels = weight.shape[0], weight[0].numel()
    tokens = parts.sequence
    centred = attention.norm is not None
    biased = _is_biased(attention, trained)
    ranks = adapter_ranks(model, attention.weights, trained)
    if trained_whole := set(attention.weights) <= set(trained):
        equations = width + biased - centred - tokens
    elif moved and sum(ranks) >= tokens:
        equations = width - centred - tokens
    else:
        equations = min(sum(max(0, rank - tokens) for rank in ranks), width - centred)
    known = parts.patch_weight in trained or (
        moved and sum(adapter_ranks(model, [parts.patch_weight], trained)) >= parts.tokens
    )
    unknowns = (min(parts.tokens, pixels) if known else pixels) + (
        centred and biased and trained_whole
    )
    return Size(max(0, equations), unknowns)


def refuse_too_little(
    model: nn.Module, parts: VitParts, trained: Collection[str], *, moved: bool
) -> None:
    """Raise where a part is not trained that the system cannot do without."""
    attention = _attention(model, parts)
    names = (parts.patch_weight, *attention.weights)
    missing = [name for name in names if name not in trained]
    size = size_of(model, parts, trained, moved=moved)
    if missing and not size.determined:
        raise AttackError(
            f"row_space needs the gradient of {' and '.join(missing)}, which was not trained or "
            f"not uploaded; what there is gives {size.equations} equations for {size.unknowns} "
            f"unknowns a patch."
        )


def solve(
    update: dict[str, Tensor],
    model: nn.Module,
    parts: VitParts,
    notes: list[str],
    embedding: Added,
) -> tuple[Tensor, float]:
    """Patches (N, P) and the relative residual of their equations."""
    attention = _attention(model, parts)
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    position, tokens = embedding.positions, parts.sequence

    pixels, reads, moved = _pixels(update, model, parts), [], True
    if set(attention.weights) <= update.keys():
        reads = [_Read(_whole_rows(update, attention), tokens)]
    else:
        adapters = [a for name in attention.weights if (a := adapter_of(model, name))]
        rows = [found for a in adapters if (found := a.rows(update)) is not None]
        moved = sum(map(len, rows)) >= tokens
        if moved:
            reads = [_Read(torch.cat(rows), tokens)]
        else:
            shown = [(a, found) for a in adapters if (found := a.columns(update)) is not None]
            reads = [_Read(found, tokens, a.down) for a, found in shown if a.rank > tokens]
    refuse_too_little(model, parts, update, moved=moved)
    width = weights[parts.patch_weight].shape[0]
    biased = any(read.columns > width for read in reads)
    rank = int(torch.linalg.matrix_rank(position, rtol=1e-5))
    size = size_of(model, parts, update, moved=moved)
    if not size.determined or rank < parts.tokens:
        notes.append(
            f"underdetermined: {size.equations} equations for {size.unknowns} unknowns a patch, "
            f"positions of rank {rank} for {parts.tokens} patches"
        )
    projection = embedding.gain * weights[parts.patch_weight].flatten(1)
    offset = position
    if parts.patch_bias is not None:
        offset = offset + embedding.gain * weights[parts.patch_bias]

    def outside_span(values: Tensor, deviation: Tensor) -> Tensor:
        """Rows (gamma C v + s beta, s), or (v, s) without a norm, less their part in the span."""
        if attention.norm is not None:
            gamma, beta = weights[f"{attention.norm}.weight"], weights[f"{attention.norm}.bias"]
            values = gamma * (values - values.mean(1, keepdim=True)) + deviation[:, None] * beta
        rows = torch.cat([values, deviation[:, None]], 1) if biased else values
        return torch.cat([read.outside(rows) for read in reads], 1)

    zero = torch.zeros(len(pixels), dtype=torch.float64)
    columns = [outside_span(pixels @ projection.T, zero)]
    # A token's deviation is one more unknown; without a norm there is none, and it stays 1.
    constant = float(attention.norm is None)
    if attention.norm is not None:
        none, one = torch.zeros(1, offset.shape[1]), torch.ones(1)
        columns.append(outside_span(none.double(), one.double()))
    system = torch.cat(columns)  # (r + 1, D + 1)
    wanted = -outside_span(offset, torch.full((len(offset),), constant, dtype=torch.float64))
    solution = torch.linalg.lstsq(system.T, wanted.T, driver="gelsd", rcond=1e-9).solution
    misfit = torch.linalg.norm(system.T @ solution - wanted.T)
    patches = solution[: len(pixels)].T @ pixels
    return patches, float(misfit / torch.linalg.norm(wanted).clamp(min=1e-300))


class _Read:
    """A gradient in whose row space every token lies, or an adapter's image ``through`` of it."""

    def __init__(self, gradient: Tensor, tokens: int, through: Tensor | None = None):
        self.columns, self.through = gradient.shape[1], through
        self.span = _rows(gradient, tokens)  # (T, columns)

    def outside(self, rows: Tensor) -> Tensor:
        """Rows (n, D), or (n, D + 1), less their part in the span."""
        if self.through is not None:
            rows = rows @ self.through.T
        return rows - (rows @ self.span.T) @ self.span


def _pixels(update: dict[str, Tensor], model: nn.Module, parts: VitParts) -> Tensor:
    """A basis (k, P) of the patches: of the gradient's rows where it shows them, else all P."""
    size = model.get_parameter(parts.patch_weight)[0].numel()
    rank = min(parts.tokens, size)
    if parts.patch_weight in update:
        (d_patch,) = uploaded(update, [parts.patch_weight], "row_space")
        refuse_zeros(d_patch, "the patch projection's", model, "row_space")
        return _rows(d_patch.flatten(1), rank)
    adapter = adapter_of(model, parts.patch_weight)
    rows = adapter.rows(update) if adapter is not None else None
    if rows is not None and len(rows) >= parts.tokens:
        return _rows(rows, rank)
    return torch.eye(size, dtype=torch.float64)


def _is_biased(attention: FirstAttention, trained: Collection[str]) -> bool:
    """Whether the biases of all layers were uploaded beside their weights."""
    return None not in attention.biases and set(attention.biases) <= set(trained)


def _whole_rows(update: dict[str, Tensor], attention: FirstAttention) -> Tensor:
    """The gradients of all layers that read the tokens, one below the other: [dW | db], or dW where
    one of them has no bias."""
    weight = torch.cat(uploaded(update, attention.weights, "row_space"))
    if not _is_biased(attention, update.keys()):
        return weight
    biases = [name for name in attention.biases if name is not None]
    return torch.cat([weight, torch.cat(uploaded(update, biases, "row_space"))[:, None]], 1)


def _rows(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal basis (rank, columns) of the strongest row directions."""
    _, _, rows = torch.linalg.svd(matrix, full_matrices=False)
    return rows[:rank]


def _added(model: nn.Module, parts: VitParts, side: int) -> Added:
    """What is added to the patches: one tensor of the model's, or whatever it computes."""
    _refuse_none(parts)
    if parts.position is None or parts.gained:
        return measured(model, side, "row_space")
    position = tensor_of(model, parts.position).detach().double()
    return Added(1.0, parts.rows_of(position))


def _refuse_none(parts: VitParts) -> None:
    if parts.position is None and not parts.measurable:
        raise AttackError(
            "row_space needs the positions that the model adds to its patches; there are none, or "
            "it does more to them than that."
        )


def _attention(model: nn.Module, parts: VitParts) -> FirstAttention:
    if parts.attention is None:
        raise AttackError(
            f"row_space needs layers of a first attention that read every token of a "
            f"{type(model).__name__}, bare or behind a LayerNorm; there are none."
        )
    return parts.attention
