"""Patch-embedding solve: one image of a Vision Transformer, exactly, from one linear system.

With a learnable position embedding E and one image of patches X (N, P), the patch projection W
(D, P) and E share the gradient G = dL/dE (N, D) of the tokens, so that

    dL/dW = G^T X

holds exactly whatever comes after: pre-norm, residuals, class token or pooling, any depth. It also
holds for the weight delta of several SGD steps on one image: every step adds its own G_k^T X with
the same factor on both sides, whatever momentum and clipping make of it, and what weight decay adds
is known. The least squares for X needs neither attention nor an inverse of W. It is determined
where rank(G) = N; pre-norm makes the rows of G orthogonal to the ones vector, so the rank is at
most D - 1. An adapter (LoRA, `closed.adapters`) on a projection that is not trained itself shows
B^T dW = (B^T G^T) X, which does where its rank is at least N and B is no longer zero, or
dW A^T = G^T (X A^T), which does where its rank is at least P. Derived here; APRIL (Lu et al. 2022)
is related: it solves for the tokens inside a modified first attention block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, assert_never

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.attacks.closed import (
    ClosedForm,
    Hidden,
    RidgeSolution,
    Solved,
    fold_patches,
    refuse_frozen,
    ridge_solve,
    uploaded,
)
from fedsim.attacks.closed.adapters import Adapter, adapter_of
from fedsim.attacks.closed.eight_bit import SNAP_BELOW, distance_to_8_bit, on_8_bit_grid
from fedsim.attacks.pulls import kept_weight
from fedsim.attacks.transformers import measured, refuse_zeros, transformer_parts
from fedsim.core.anatomy import VitParts
from fedsim.core.attack import Progress
from fedsim.core.defense import Informed
from fedsim.core.epochs import samples_of_epoch, steps_of_round
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.observation import Public
from fedsim.core.spec import Upload


@dataclass(frozen=True)
class PatchSolve(ClosedForm):
    """``ridge`` None: chosen by generalised cross-validation, without the truth.

    ``snap``: pictures are stored in 8 bits, so where the estimate itself lies close to that grid
    (far closer than chance) it is moved onto it, which makes it exact. ``adaptive``: use what is
    known of the client's defenses; where positions are hidden behind one unknown embedding (MJP),
    its gradient is one more row, and one patch stands for all that are hidden.
    """

    uses: ClassVar[frozenset[str]] = frozenset(
        {"optimizer", "learning_rate", "local_steps", "defenses"}
    )

    ridge: Annotated[float, Field(ge=0)] | None = None
    snap: bool = True
    adaptive: bool = True

    def check_model(self, model: nn.Module, public: Public) -> None:
        parts = transformer_parts(model, "patch_solve")
        needed = [_position(parts)]
        trained = model.get_parameter(parts.patch_weight).requires_grad
        adapter = None if trained else adapter_of(model, parts.patch_weight)
        needed += [parts.patch_weight] if adapter is None else adapter.names
        refuse_frozen(model, needed, "patch_solve")
        if adapter is not None:
            _refuse_small(adapter, parts, adapter.rank >= parts.tokens)

    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        parts = transformer_parts(model, "patch_solve")
        informed = view.informed(model) if self.adaptive else Informed(view.update)
        tensors, notes = informed.update.tensors, list(informed.notes)
        match view.update.kind:
            case Upload.GRADIENT:
                pass
            case Upload.DELTA:
                tensors = _without_decay(view, tensors, model, notes)
            case other:
                assert_never(other)
        tokens = self._tokens(tensors, parts)
        refuse_zeros(tokens, "the position embedding's", model, "patch_solve")
        hidden = Hidden.among(tokens, tensors, parts) if self.adaptive else None
        if hidden is not None:
            tokens = hidden.joined(tokens, tensors)
        solution = self._solved(tokens, tensors, model, parts)
        progress(1, 1, solution.residual)
        patches = solution.x if hidden is None else hidden.spread(solution.x)
        if parts.gained:  # dW = gain G^T X
            patches = patches / measured(model, view.image_size, "patch_solve").gain
        notes += _notes(solution, len(tokens), view.batch_size)
        return Solved(fold_patches(patches, parts), solution.residual, notes, informed.undo)

    def finish(self, image: Tensor, notes: list[str]) -> Tensor:
        if not self.snap or (distance := distance_to_8_bit(image)) >= SNAP_BELOW:
            return image
        notes.append(
            f"moved onto the 8-bit grid, from {distance:.1e} of a step away (chance: 0.25)"
        )
        return on_8_bit_grid(image)

    def _tokens(self, update: dict[str, Tensor], parts: VitParts) -> Tensor:
        """G, (N, D)."""
        (position,) = uploaded(update, (_position(parts),), "patch_solve")
        return parts.rows_of(position)

    def _solved(
        self, tokens: Tensor, update: dict[str, Tensor], model: nn.Module, parts: VitParts
    ) -> RidgeSolution:
        """X of  dW = G^T X,  or of what an adapter shows of dW, (D, P)."""
        adapter = adapter_of(model, parts.patch_weight)
        if adapter is None or parts.patch_weight in update:
            (weight,) = uploaded(update, (parts.patch_weight,), "patch_solve")
            return ridge_solve(tokens.T, weight.flatten(1), ridge=self.ridge)
        rows, columns = adapter.rows(update), adapter.columns(update)
        if rows is not None and adapter.rank >= len(tokens):
            return ridge_solve(adapter.up.T @ tokens.T, rows, ridge=self.ridge)
        _refuse_small(adapter, parts, rows is not None)
        if columns is None:
            raise AttackError(
                f"patch_solve needs the gradient of {adapter.names[1]}, which was not uploaded, or "
                f"is zero."
            )
        seen = ridge_solve(tokens.T, columns, ridge=self.ridge)  # X A^T
        return replace(seen, x=seen.x @ torch.linalg.pinv(adapter.down.T))


def _position(parts: VitParts) -> str:
    if parts.position is None:
        raise AttackError(
            "patch_solve needs positions that are learned one by one; no parameter was found that "
            "is added to the patches as it is."
        )
    return parts.position


def _refuse_small(adapter: Adapter, parts: VitParts, moved: bool) -> None:
    """Raise where the adapter of the patch projection shows too little of its gradient."""
    pixels = adapter.down.shape[1]
    if adapter.rank >= pixels or (moved and adapter.rank >= parts.tokens):
        return
    when = "" if moved else ", and none before the first update has moved it from zero"
    raise AttackError(
        f"patch_solve needs the gradient of {parts.patch_weight}, which nobody trains; its adapter "
        f"of rank {adapter.rank} shows {min(adapter.rank, parts.tokens)} equations for "
        f"{parts.tokens} patches{when}."
    )


def _without_decay(
    view: View, delta: dict[str, Tensor], model: nn.Module, notes: list[str]
) -> dict[str, Tensor]:
    """A weight delta less what weight decay made of the weights, as far as it is known.

    SGD with momentum and decay is linear: the weights after the steps are f times those before,
    plus a filter of the gradients that is the same for every weight. One number f, found by running
    the recursion without gradients, takes the first part out.
    """
    if not (view.grants("optimizer") and view.grants("learning_rate")):
        notes.append("the client's optimiser is not known: solved as plain SGD")
        return delta
    protocol = view.protocol()
    if protocol.optimizer != "sgd":
        notes.append(f"{protocol.optimizer} scales every weight on its own: the system is bent")
        return delta
    if protocol.weight_decay == 0 or not view.grants("local_steps"):
        return delta
    steps, epochs = view.local_steps
    samples = samples_of_epoch(view.update.num_examples, epochs) if epochs else 0
    weight = kept_weight(protocol, steps_of_round(steps, epochs, samples, view.batch_size))
    parameters = dict(model.named_parameters())
    return {
        name: tensor.double() - (weight - 1) * parameters[name].detach().double()
        for name, tensor in delta.items()
    }


_POOR_FIT = 0.05  # relative residual beyond which several pictures must stand behind a delta


def _notes(solution: RidgeSolution, unknowns: int, batch: int) -> list[str]:
    notes = []
    if batch > 1:
        notes.append(
            f"underdetermined: a batch of {batch} images mixes in one system; the estimate is a "
            f"blend, given {batch} times"
        )
    elif solution.residual > _POOR_FIT:
        notes.append(
            f"the equations of one image do not fit (residual {solution.residual:.2f}): noise, or "
            f"several images stand behind the update"
        )
    if solution.rank < unknowns:
        notes.append(
            f"underdetermined: rank {solution.rank} for {unknowns} patches; the estimate "
            f"leans on the ridge ({solution.ridge:.1e})"
        )
    return notes
