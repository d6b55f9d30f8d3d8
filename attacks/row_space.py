"""Row-space solve: one image of a Vision Transformer whose position embedding is frozen.

The first block's attention reads u_t = LN(z_t) of every token, z_t = W x_t + b + E_t, and its
weights' gradient is a sum of outer products with u_t: the row space S of [dW_qkv | db_qkv] is the
span of all (u_t, 1). Multiplied by the token's deviation s_t, membership reads

    (gamma C (W x_t + b + E_t) + s_t beta, s_t)  in  S        (C: centering)

which is linear in (x_t, s_t). The patches x_t themselves lie in the row space of dW. One least
squares with a right-hand side for each patch gives all of them; the position gradient is never
used. It wants known positions E of full rank, and D - 1 >= min(N, P) + N + 2 equations. Where the
attention reads the bare tokens, (z_t, 1) lies in S, and there is no s_t to find; queries, keys and
values of layers of their own are stacked, and without biases the last column is left out. Derived
here; related to the subspace attacks on text (DAGER).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.closed import ClosedForm, Solved, fold_patches, uploaded
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
        _attention(model, parts)

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

    (d_patch,) = uploaded(update, [parts.patch_weight], "row_space")
    refuse_zeros(d_patch, "the patch projection's", model, "row_space")
    pixels = _rows(d_patch.flatten(1), min(parts.tokens, d_patch[0].numel()))  # (r, P)
    reads = _reads(update, attention)
    biased = reads.shape[1] > d_patch.shape[0]
    span = _rows(reads, tokens)  # (T, D + 1), or (T, D)
    rank = int(torch.linalg.matrix_rank(position, rtol=1e-5))
    unknowns = len(pixels) + (attention.norm is not None and biased)
    # Of the columns, less one: centred rows have no part along ones.
    equations = span.shape[1] - (attention.norm is not None) - len(span)
    if equations < unknowns or rank < parts.tokens:
        notes.append(
            f"underdetermined: {max(equations, 0)} equations for {unknowns} unknowns a patch, "
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
        return rows - (rows @ span.T) @ span

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


def _reads(update: dict[str, Tensor], attention: FirstAttention) -> Tensor:
    """The gradients of all layers that read the tokens, one below the other: [dW | db], or dW where
    one of them has no bias."""
    weight = torch.cat(uploaded(update, attention.weights, "row_space"))
    biases = [name for name in attention.biases if name is not None]
    if len(biases) < len(attention.weights):
        return weight
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
