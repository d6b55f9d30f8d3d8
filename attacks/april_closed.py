"""APRIL in closed form (Lu et al. 2022): tokens from the first attention, then pixels.

Where the first attention reads the embedded tokens Z themselves (the paper's Architecture A:
`model.options: {plain_first_block: true}`), with G = dL/dE the gradient of the position embedding,

    G^T Z = Q^T dQ + K^T dK + V^T dV        (their Theorem 1)

determines Z, and the pseudo-inverse of the patch projection gives the pixels. With fewer channels
than pixels in a patch, that inverse loses most of them: `patch_solve` does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedsim.attacks.closed import (
    ClosedForm,
    Hidden,
    Solved,
    fold_patches,
    refuse_frozen,
    ridge_solve,
    uploaded,
)
from fedsim.attacks.transformers import transformer_parts
from fedsim.core.anatomy import VitParts, tensor_of
from fedsim.core.attack import Progress
from fedsim.core.defense import Informed
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.models import PlainBlock
from fedsim.core.observation import Public


@dataclass(frozen=True)
class AprilClosed(ClosedForm):
    """Solves in float64; gradients in float32 cost it most of its exactness. ``adaptive``: use what
    is known of the client's defenses; behind one unknown embedding (MJP) one token stands for all
    that are hidden, as in `patch_solve`."""

    uses: ClassVar[frozenset[str]] = ClosedForm.uses | {"defenses"}

    adaptive: bool = True

    def check_model(self, model: nn.Module, public: Public) -> None:
        parts, position = _parts(model)
        reads = parts.attention.weights if parts.attention else ()
        refuse_frozen(model, (position, *reads), "april_closed")

    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        parts, position = _parts(model)
        reads = parts.attention.weights if parts.attention else ()
        informed = view.informed(model) if self.adaptive else Informed(view.update)
        update, notes = informed.update.tensors, list(informed.notes)
        gradient, *d_qkv = uploaded(update, (position, *reads), "april_closed")
        weights = {n: p.detach().double() for n, p in model.named_parameters()}
        gradient = gradient.reshape(-1, gradient.shape[-1])  # G, (T, D)
        places = weights[position].reshape(-1, gradient.shape[-1])
        hidden = Hidden.among(gradient, update, parts) if self.adaptive else None
        if hidden is not None:
            gradient = hidden.joined(gradient, update)
        product = torch.cat([weights[name] for name in reads]).T @ torch.cat(d_qkv)  # (D, D)
        exact = update[position].dtype == torch.float64
        solution = ridge_solve(gradient.T, product, eps=1e-15 if exact else 1e-7)
        progress(1, 1, solution.residual)

        if view.batch_size > 1:
            notes.append(f"underdetermined: {view.batch_size} images mix in one system")
        if solution.rank < len(gradient):
            notes.append(
                f"underdetermined: rank {solution.rank} for {len(gradient)} tokens; the estimate "
                f"leans on the ridge ({solution.ridge:.1e})"
            )
        projection = weights[parts.patch_weight].flatten(1)  # (D, P)
        if projection.shape[0] < projection.shape[1]:
            notes.append(
                f"underdetermined: {projection.shape[0]} channels for {projection.shape[1]} "
                f"pixels a patch; the pseudo-inverse loses the rest"
            )
        tokens = solution.x
        if hidden is not None:
            tokens = hidden.spread(solution.x)
            shared = weights[hidden.unknown].reshape(1, -1)
            places = torch.where(hidden.places[:, None], shared, places)
        embedded = (tokens - places)[parts.prefix_tokens :]
        if parts.patch_bias is not None:
            embedded = embedded - weights[parts.patch_bias]
        patches = embedded @ torch.linalg.pinv(projection).T
        return Solved(fold_patches(patches, parts), solution.residual, notes, informed.undo)


def _parts(model: nn.Module) -> tuple[VitParts, str]:
    """The parts of a model for which the theorem holds, and the name of its positions."""
    parts = transformer_parts(model, "april_closed")
    block = model.get_submodule(parts.blocks[0]) if parts.blocks else nn.Identity()
    if not isinstance(block, PlainBlock):
        raise AttackError(
            "april_closed needs a first block without norm and skips (model.options: "
            "{plain_first_block: true}); its theorem does not hold for this one."
        )
    if parts.position is None:
        raise AttackError("april_closed needs a learnable position embedding; there is none.")
    if parts.gained or not parts.is_plain(tensor_of(model, parts.position)):
        raise AttackError(
            "april_closed needs a table of positions that ends with those of the patches, and is "
            "added to these as they are."
        )
    return parts, parts.position
