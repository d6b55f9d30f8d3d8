"""APRIL in closed form (Lu et al. 2022): tokens from the first attention, then pixels.

Where the first attention reads the embedded tokens Z themselves (the paper's Architecture A:
`model.options: {plain_first_block: true}`), with G = dL/dE the gradient of the position embedding,

    G^T Z = Q^T dQ + K^T dK + V^T dV        (their Theorem 1)

determines Z, and the pseudo-inverse of the patch projection gives the pixels. With fewer
channels than pixels in a patch, that inverse loses most of them: `patch_solve` does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attacks.labels import recover_labels
from attacks.patch_solve import fold_patches
from attacks.solvers import ridge_solve
from fedsim.core.attack import Progress, Reconstruction
from fedsim.core.errors import AttackError, ModelError
from fedsim.core.knowledge import View
from fedsim.core.models import PlainBlock, vit_parts


@dataclass(frozen=True)
class AprilClosed:
    """Solves in float64; gradients in float32 cost it most of its exactness."""

    needs: ClassVar[frozenset[str]] = frozenset(
        {"update", "weights", "architecture", "image_size", "normalisation", "batch_size"}
    )

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        model, update = view.model(), view.update
        try:
            parts = vit_parts(model)
        except ModelError as error:
            raise AttackError(f"april_closed attacks Vision Transformers: {error}") from error
        block = model.get_submodule(parts.blocks[0]) if parts.blocks else nn.Identity()
        if not isinstance(block, PlainBlock):
            raise AttackError(
                "april_closed needs a first block without norm and skips (model.options: "
                "{plain_first_block: true}); its theorem does not hold for this one."
            )
        qkv = f"{parts.blocks[0]}.attn.qkv.weight"
        missing = [n for n in (parts.position, qkv) if n is None or n not in update.tensors]
        if missing:
            raise AttackError(f"april_closed needs the gradient of {missing[0]}: not uploaded.")
        assert parts.position is not None
        weights = {n: p.detach().double() for n, p in model.named_parameters()}
        gradient = update.tensors[parts.position].double().cpu()
        gradient = gradient.reshape(-1, gradient.shape[-1])  # G, (T, D)
        product = weights[qkv].T @ update.tensors[qkv].double().cpu()  # (D, D)
        if not bool(torch.isfinite(gradient).all() and torch.isfinite(product).all()):
            raise AttackError("the update holds numbers that are not finite.")
        exact = update.tensors[qkv].dtype == torch.float64
        solution = ridge_solve(gradient.T, product, eps=1e-15 if exact else 1e-7)
        progress(1, 1, solution.residual)

        notes = []
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
        position = weights[parts.position].reshape(-1, gradient.shape[-1])
        embedded = (solution.x - position)[parts.prefix_tokens :]
        if parts.patch_bias is not None:
            embedded = embedded - weights[parts.patch_bias]
        patches = embedded @ torch.linalg.pinv(projection).T
        mean, std = (torch.tensor(c, dtype=torch.float64) for c in view.normalisation)
        image = fold_patches(patches, parts) * std.view(3, 1, 1) + mean.view(3, 1, 1)
        return Reconstruction(
            images=image.clamp(0, 1).float().repeat(view.batch_size, 1, 1, 1),
            labels=recover_labels(update, model, view.batch_size),
            loss=solution.residual,
            notes=notes,
        )
