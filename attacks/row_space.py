"""Row-space solve: one image of a Vision Transformer whose position embedding is frozen.

The first block's attention reads u_t = LN(z_t) of every token, z_t = W x_t + b + E_t, and its
weights' gradient is a sum of outer products with u_t: the row space S of [dW_qkv | db_qkv] is the
span of all (u_t, 1). Multiplied by the token's deviation s_t, membership reads

    (gamma C (W x_t + b + E_t) + s_t beta, s_t)  in  S        (C: centering)

which is linear in (x_t, s_t). The patches x_t themselves lie in the row space of dW. One least
squares with a right-hand side for each patch gives all of them; the position gradient is never
used. It wants known positions E of full rank, and D - 1 >= min(N, P) + N + 2 equations. Derived
here; related to the subspace attacks on text (DAGER).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.closed import ClosedForm, Solved, fold_patches, uploaded
from fedsim.attacks.transformers import transformer_parts
from fedsim.core.anatomy import VitParts
from fedsim.core.attack import Progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.observation import Public


@dataclass(frozen=True)
class RowSpace(ClosedForm):
    """Solves in float64, from gradients of any precision."""

    def check_model(self, model: nn.Module, public: Public) -> None:
        parts = transformer_parts(model, "row_space")
        _positions(model, parts)
        _first_block(model, parts)

    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        parts = transformer_parts(model, "row_space")
        notes: list[str] = []
        if view.batch_size > 1:
            notes.append(
                f"underdetermined: the tokens of {view.batch_size} images share one row space"
            )
        patches, residual = solve(view.update.tensors, model, parts, notes)
        progress(1, 1, residual)
        return Solved(fold_patches(patches, parts), residual, notes)


def solve(
    update: dict[str, Tensor], model: nn.Module, parts: VitParts, notes: list[str]
) -> tuple[Tensor, float]:
    """Patches (N, P) and the relative residual of their equations."""
    norm, qkv = _first_block(model, parts)
    names = [parts.patch_weight, f"{qkv}.weight", f"{qkv}.bias"]
    d_patch, d_qkv, d_bias = uploaded(update, names, "row_space")
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    position = _positions(model, parts)
    tokens = parts.tokens + parts.prefix_tokens
    width = d_qkv.shape[1]

    pixels = _rows(d_patch.flatten(1), min(parts.tokens, d_patch[0].numel()))  # (r, P)
    span = _rows(torch.cat([d_qkv, d_bias[:, None]], 1), tokens)  # (T, D + 1)
    rank = int(torch.linalg.matrix_rank(position, rtol=1e-5))
    unknowns = len(pixels) + 1
    equations = width - len(span)  # of D + 1, less one: centred rows have no part along ones
    if equations < unknowns or rank < parts.tokens:
        notes.append(
            f"underdetermined: {max(equations, 0)} equations for {unknowns} unknowns a patch, "
            f"positions of rank {rank} for {parts.tokens} patches"
        )
    gamma, beta = weights[f"{norm}.weight"], weights[f"{norm}.bias"]
    projection = weights[parts.patch_weight].flatten(1)
    offset = position
    if parts.patch_bias is not None:
        offset = offset + weights[parts.patch_bias]

    def outside_span(values: Tensor, deviation: Tensor) -> Tensor:
        """Rows (gamma C v + s beta, s) without their part in the span."""
        centred = gamma * (values - values.mean(1, keepdim=True)) + deviation[:, None] * beta
        rows = torch.cat([centred, deviation[:, None]], 1)
        return rows - (rows @ span.T) @ span

    zero = torch.zeros(len(pixels), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    columns = torch.cat(
        [
            outside_span(pixels @ projection.T, zero),
            outside_span(torch.zeros(1, width, dtype=torch.float64), one),
        ]
    )  # (r + 1, D + 1)
    wanted = -outside_span(offset, torch.zeros(len(offset), dtype=torch.float64))  # (N, D + 1)
    solution = torch.linalg.lstsq(columns.T, wanted.T, driver="gelsd", rcond=1e-9).solution
    misfit = torch.linalg.norm(columns.T @ solution - wanted.T)
    return solution[:-1].T @ pixels, float(misfit / torch.linalg.norm(wanted).clamp(min=1e-300))


def _rows(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal basis (rank, columns) of the strongest row directions."""
    _, _, rows = torch.linalg.svd(matrix, full_matrices=False)
    return rows[:rank]


def _positions(model: nn.Module, parts: VitParts) -> Tensor:
    if parts.position is None:
        raise AttackError("row_space needs the positions that the model adds; there are none.")
    position = model.get_parameter(parts.position).detach().double()
    return position.reshape(-1, position.shape[-1])[parts.prefix_tokens :]


def _first_block(model: nn.Module, parts: VitParts) -> tuple[str, str]:
    """Names of the first block's norm and of its joint query, key and value projection."""
    if not parts.blocks:
        raise AttackError(f"row_space finds no blocks in a {type(model).__name__}.")
    block = parts.blocks[0]
    modules = dict(model.named_modules())
    norm, qkv = f"{block}.norm1", f"{block}.attn.qkv"
    if not isinstance(modules.get(norm), nn.LayerNorm) or not isinstance(
        modules.get(qkv), nn.Linear
    ):
        raise AttackError(
            "row_space needs a pre-norm first block with one query, key and value projection."
        )
    return norm, qkv
