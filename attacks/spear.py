"""SPEAR (Dimitrov et al. 2024): a whole batch from the gradient of one linear layer before a ReLU.

The gradient of a first layer Z = W X + b is [dW | db] = D [X^T | 1], of rank B, with D = dL/dZ
(m, B) zero wherever a unit is off. Of all ways to write it as a product of that rank only one has
so many zeros (Thm. 3.2), and they are looked for in `closed.sparse`; the bias sets the scale, and
what units give for the pictures found must be positive just where D is not zero
(`closed.relu_rows`). That decides which directions are believed, takes the last digits out of the
noise, and says in the end how far the gradient is from that of the pictures found.

Labels come from a replay: of the classes, the one whose gradient points the way of a picture's D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.attacks.closed import refuse_frozen, uploaded
from fedsim.attacks.closed.eight_bit import SNAP_BELOW, distance_to_8_bit, on_8_bit_grid
from fedsim.attacks.closed.first_layer import FirstLayer, first_layer, gradients_at
from fedsim.attacks.closed.relu_rows import Layer
from fedsim.attacks.closed.sparse import ColumnSpace, Search
from fedsim.attacks.matching.matcher import silence
from fedsim.attacks.pulls import kept_weight
from fedsim.core.anatomy import batchnorm_names
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.defense import Informed
from fedsim.core.epochs import samples_of_epoch, steps_of_round
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Update
from fedsim.core.observation import Public
from fedsim.core.spec import Upload

_POOR_FIT = 1e-4  # relative residual beyond which pictures are not called exact
_CONTRADICTED = 5  # times the part of the gradient that its rank leaves out


@dataclass(frozen=True)
class Spear(Attack):
    """``starts``: of the search, at most; it ends when every picture is found. ``snap``: a picture
    that is far closer to the 8-bit grid than chance is moved onto it. ``adaptive``: use what is
    known of the client's defenses."""

    uses: ClassVar[frozenset[str]] = frozenset(
        {"optimizer", "learning_rate", "local_steps", "defenses"}
    )

    starts: Annotated[int, Field(ge=1)] = 16384
    snap: bool = True
    adaptive: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            {"update", "weights", "architecture", "image_size", "normalisation", "batch_size"}
        )

    def check_model(self, model: nn.Module, public: Public) -> None:
        protocol = public.protocol
        if protocol.upload is Upload.DELTA:
            _refuse_steps(protocol.optimizer, public.local_steps)
        mode = model.training
        try:
            layer = first_layer(model.train(protocol.mode == "train"), public.image_size, "spear")
        finally:
            model.train(mode)
        refuse_frozen(model, (layer.weight, layer.bias), "spear")
        _refuse_many(public.batch_size, model.get_parameter(layer.weight))

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        model, side = view.model(), view.image_size
        first = first_layer(model, side, "spear")
        informed = view.informed(model) if self.adaptive else Informed(view.update)
        notes = list(informed.notes)
        matrix = _gradient(view, informed.update, model, first, notes)
        layer = _layer(matrix, model, first, view.batch_size)
        search = Search(layer.space, layer.judge, view.coin())
        search.run(self.starts, lambda starts, _: progress(starts, self.starts, None))
        if not search.found:
            raise AttackError(
                f"no picture came out of {search.starts} starts: noise, several steps, or pictures "
                f"that {len(matrix)} units do not tell apart."
            )
        rows = layer.pictures(layer.polished([column.q for column in search.found]))
        columns, misfit = layer.explained(rows)
        notes += _notes(search, layer, view.batch_size, misfit)
        labels = _labels(model, first, rows[:, :-1], columns, side, notes)
        mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in view.normalisation)
        images = (first.fold(rows[:, :-1], side) * std + mean).clamp(0, 1)
        images = self._finished(images, notes)
        if informed.undo is not None:
            images = informed.undo(images)
        return Reconstruction(images=images.float(), labels=labels, loss=misfit, notes=notes)

    def _finished(self, images: Tensor, notes: list[str]) -> Tensor:
        """Pictures (c, 3, H, W) in [0, 1], moved onto the 8-bit grid where they are close to it."""
        if not self.snap:
            return images
        distances = [distance_to_8_bit(image) for image in images]
        near = [distance < SNAP_BELOW for distance in distances]
        if any(near):
            far = max(d for d, snapped in zip(distances, near, strict=True) if snapped)
            notes.append(
                f"{sum(near)} moved onto the 8-bit grid, from up to {far:.1e} of a step away "
                f"(chance: 0.25)"
            )
        return torch.stack(
            [
                on_8_bit_grid(image) if snapped else image.float()
                for image, snapped in zip(images, near, strict=True)
            ]
        )


def _refuse_steps(optimizer: str, steps: int | None) -> None:
    """Raise where a weight delta is no multiple of one gradient."""
    if optimizer != "sgd":
        raise AttackError(
            f"spear reads one gradient, and {optimizer} scales every weight of a delta on its own."
        )
    if steps is not None and steps != 1:
        raise AttackError(
            f"spear reads one gradient, and a delta of {steps} steps mixes as many: "
            f"train.local_steps=1."
        )


def _refuse_many(batch: int, weight: Tensor) -> None:
    units, pixels = weight.shape
    if batch >= min(units, pixels):
        raise AttackError(
            f"spear needs fewer pictures than units and pixels; a batch of {batch} stands behind "
            f"{units} units for {pixels} pixels."
        )


def _gradient(
    view: View, update: Update, model: nn.Module, first: FirstLayer, notes: list[str]
) -> Tensor:
    """[dW | db], or a multiple of it, (m, n + 1)."""
    weight, bias = uploaded(update.tensors, (first.weight, first.bias), "spear")
    matrix = update.kind.sign * torch.cat([weight, bias[:, None]], 1)
    if update.kind is Upload.DELTA:
        known = view.known_protocol()
        steps, epochs = view.local_steps if view.grants("local_steps") else (None, None)
        samples = samples_of_epoch(update.num_examples, epochs) if epochs else 0
        taken = steps_of_round(steps, epochs, samples, view.batch_size)
        _refuse_steps(known.optimizer if known is not None else "sgd", taken)
        if known is None:
            notes.append("the client's optimiser is not known: read as one step of plain SGD")
        else:  # what weight decay takes of the weights is no gradient
            matrix = matrix - update.kind.sign * (kept_weight(known, 1) - 1) * _own(model, first)
    if not bool((matrix != 0).any()):
        raise AttackError(
            "the first layer's gradient is zero: no unit is on, or what follows it lets nothing "
            "back."
        )
    return matrix


def _own(model: nn.Module, first: FirstLayer) -> Tensor:
    """[W | b], (m, n + 1)."""
    weight, bias = (
        model.get_parameter(name).detach().double().cpu() for name in (first.weight, first.bias)
    )
    return torch.cat([weight, bias[:, None]], 1)


def _notes(search: Search, layer: Layer, batch: int, misfit: float) -> list[str]:
    """What was found, and how far it is to be believed."""
    rank, count = search.space.rank, len(search.found)
    notes = []
    if count == rank and misfit > _CONTRADICTED * layer.space.unexplained:
        notes.append(
            f"{count} directions have the zeros of a picture, but together they contradict the "
            f"gradient: not all of them are pictures"
        )
    else:
        notes.append(f"{count} of {batch} pictures found, in {search.starts} starts")
    if rank < batch:
        notes.append(
            f"the gradient shows {rank} directions: pictures are the same, without a gradient, or "
            f"below the noise"
        )
    if count < rank:
        notes.append(
            "without the others the pictures found are approximate: more starts may find all, if "
            "the units tell them apart"
        )
    if misfit > _POOR_FIT:
        notes.append(
            f"the gradient is {misfit:.1e} away from that of the pictures found: they are not exact"
        )
    return notes


def _layer(matrix: Tensor, model: nn.Module, first: FirstLayer, batch: int) -> Layer:
    _refuse_many(batch, matrix[:, :-1])
    return Layer(ColumnSpace.of(matrix, batch), _own(model, first))


def _labels(
    model: nn.Module, first: FirstLayer, rows: Tensor, columns: Tensor, side: int, notes: list[str]
) -> Tensor | None:
    """The class (c,) of each picture: the gradients of all classes' losses in the layer's output
    are compared with the columns of D, up to their size."""
    if model.training and batchnorm_names(model):
        notes.append("no labels: BatchNorm mixes what the pictures of a batch send back")
        return None
    silence(model)
    model.requires_grad_(True)
    module = model.get_submodule(first.weight.rpartition(".")[0])
    images = first.fold(rows, side).to(next(model.parameters()))
    with torch.no_grad():
        predicted = model(images).softmax(1)
    agreement = []
    for target in torch.eye(predicted.shape[1]).to(predicted):
        gradient = gradients_at(model, module, images, predicted - target).gradient.double().cpu()
        agreement.append(torch.cosine_similarity(gradient, columns.T, dim=1))
    return torch.stack(agreement).argmax(0)
