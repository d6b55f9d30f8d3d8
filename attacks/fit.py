"""Fit: how well a reconstruction explains the update, as the attacker itself can tell.

The pictures are put through the model as the attacker simulates its client, and what that gives is
compared with the update, layer by layer, by direction. One cosine over all layers would hear the
head alone. Nothing here knows the truth: this is by which an attacker with several reconstructions
picks one, and by which it knows that a picture is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsim.attacks.matching import MatchingAttack, Objective, Problem
from fedsim.attacks.matching.label_rule import classes_of
from fedsim.attacks.matching.objectives import Distance, Target, objective_of
from fedsim.core.attack import Fit, Reconstruction
from fedsim.core.errors import AttackError, ModelError
from fedsim.core.knowledge import View

FAINT = 1e-5  # of the update's norm: a smaller layer may be rounding, and proves nothing


def fit_of(view: View, result: Reconstruction, device: torch.device) -> Fit | None:
    """How well ``result`` explains what the view shows; None where that cannot be simulated."""
    if not len(result.images) or not {"update", "architecture", "weights"} <= view.granted:
        return None
    listener = _Listener()
    try:
        task = _Replay(listener=listener, steps=1, engine="first_order").task(view, device)
        problem = task.problem
        if problem.undo is not None:  # pictures were put together again: the model saw others
            return None
        images = problem.normalised(_as_many_as(problem.count, result.images))
        labels = _labels_of(result, problem, task.labels[0])
        listener.cosines = []
        task.matcher.value(images[None].float(), labels[None])
    except (AttackError, ModelError, torch.OutOfMemoryError):
        return None
    fit = listener.fit(complete=len(result.images) >= problem.count)
    if fit is None or not fit.is_exact or listener.target is None:
        return fit
    return replace(fit, complete=_says(listener.target, images.numel()))


def _labels_of(result: Reconstruction, problem: Problem, read: Tensor) -> Tensor:
    """The result's own labels where they name a class for every picture, else those ``read``."""
    own = result.labels
    if own is None or len(own) != len(read) or not bool((own >= 0).all()):
        return read
    return own.to(read) if int(own.max()) < classes_of(problem.model) else read


def _says(target: Target, unknowns: int) -> bool:
    """Whether an update can say as many numbers as are ``unknown``. Of a few (one layer of a frozen
    network, a handful that a mask left) other pictures give the same. A matrix says as many as one
    of its rank has to choose from: the head of a single picture no more than one feature vector."""
    said, whole = 0, target.squares.sum()
    for tensor, square in zip(target.tensors, target.squares, strict=True):
        if float((square / whole).sqrt()) <= FAINT:
            continue
        most = int(tensor.count_nonzero())
        if tensor.ndim > 1:
            matrix = tensor.float().flatten(1)
            rank = int(torch.linalg.matrix_rank(matrix, rtol=FAINT))
            most = min(most, rank * (sum(matrix.shape) - rank))
        said += most
        if said >= unknowns:
            return True
    return False


def _as_many_as(count: int, images: Tensor) -> Tensor:
    """So many pictures: of more the first ones, and grey ones for those that are missing."""
    blank = torch.full_like(images[:1], 0.5).expand(max(0, count - len(images)), -1, -1, -1)
    return torch.cat([images[:count], blank])


@dataclass
class _Listener:
    """An objective that notes the cosines of the layers it is shown."""

    scale_free = True
    cosines: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # layer, its share
    target: Target | None = None  # what it was shown them beside

    def __call__(self, gradients: Sequence[Tensor], target: Target) -> Distance:
        self.target, whole = target, target.squares.double().sum()
        for gradient, wanted in zip(target.seen(gradients), target.tensors, strict=True):
            g, t = gradient[0].detach().double().flatten(), wanted.double().flatten()
            norms = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(t)
            cosine = torch.where(
                norms > 0, g @ t / norms.clamp(min=1e-300), torch.zeros_like(norms)
            )
            self.cosines.append((cosine, (t.square().sum() / whole).sqrt()))
        return objective_of("cosine")(gradients, target)

    def fit(self, *, complete: bool) -> Fit | None:
        told = [1 - float(cosine) for cosine, share in self.cosines if float(share) > FAINT]
        if not told or not all(map(_is_number, told)):
            return None
        return Fit(sum(told) / len(told), max(told), complete)


def _is_number(value: float) -> bool:
    return value == value and abs(value) < float("inf")


@dataclass(frozen=True, kw_only=True)
class _Replay(MatchingAttack):
    """A matching attack that takes no step: it knows how this client is simulated."""

    listener: _Listener

    def objective(self, problem: Problem) -> Objective:
        return self.listener
