"""CENSOR (Zhang et al. 2025, NDSS): a random gradient, orthogonal to the true one layer by layer.

Per step, ``trials`` random directions are drawn, made orthogonal to each layer's gradient (their
Eq. 12) and as long as that; the one after which the batch's loss is least is used instead. The best
one begins as the true gradient (their Algorithm 1, line 11): where no trial makes the loss smaller
than it was, *the true gradient is uploaded*. Along an orthogonal direction the loss does not change
to first order, so at their rate of 1e-4 the trials differ by rounding.

Their code divides by the norm of the gradient where the projection has its square; here directions
are orthogonal, as in the paper. Norms of layers remain true, and a tensor of one number, to which
nothing is orthogonal, is uploaded as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.defense import Defense, Informed


@dataclass(frozen=True)
class Censor(Defense):
    """``trials`` and the ``rate`` of their steps as in the authors' code; ``otherwise``: what is
    used where no trial makes the loss smaller, the true ``gradient`` (Algorithm 1) or the ``best``
    trial all the same; ``rounds``: of how many, from the first, where not all are defended (the
    authors' code defends ten epochs)."""

    trials: Annotated[int, Field(ge=1)] = 20
    rate: Annotated[float, Field(gt=0)] = 1e-4
    otherwise: Literal["gradient", "best"] = "gradient"
    rounds: Annotated[int, Field(ge=1)] | None = None

    @property
    def spares(self) -> bool:  # type: ignore[override]
        return self.otherwise == "gradient"

    def at_round(self, round_: int, client: int, cohort: Sequence[int]) -> Defense:
        return Defense() if self.rounds is not None and round_ > self.rounds else self

    def batch_gradient(
        self, model: nn.Module, images: Tensor, labels: Tensor, rng: torch.Generator
    ) -> dict[str, Tensor]:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        with _untouched(model):
            gradient = _gradient(model, images, labels, trained)
            model.eval()  # as the authors compare losses

            def loss() -> float:
                return float(F.cross_entropy(model(images), labels))

            with torch.no_grad():
                best, least = (gradient, loss()) if self.spares else (None, float("inf"))
                for _ in range(self.trials):
                    trial = {n: orthogonal(g, rng) for n, g in gradient.items()}
                    with _stepped(trained, trial, self.rate):
                        after = loss()
                    if best is None or after < least:
                        best, least = trial, after
        assert best is not None  # there is a trial at least
        return best

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Nothing but the norms of layers is true of such an update, and where it was spared it
        needs no counter."""
        words = "censor: of the gradient only the layers' norms, unless no trial was better"
        return replace(seen, notes=(*seen.notes, words))


def orthogonal(gradient: Tensor, rng: torch.Generator) -> Tensor:
    """A random tensor orthogonal to this one, and as long."""
    # On the CPU, so that a seed is the same direction on every device.
    random = torch.randn(gradient.shape, generator=rng).to(gradient)
    square = gradient.square().sum()
    if gradient.numel() < 2 or not float(square) > 0:
        return torch.zeros_like(gradient)
    rest = random - (random * gradient).sum() / square * gradient  # Eq. 12
    return rest * (square.sqrt() / rest.norm().clamp(min=1e-30))


def _gradient(
    model: nn.Module, images: Tensor, labels: Tensor, trained: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(images), labels)
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(trained.items(), found, strict=True)
    }


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Whatever is computed inside leaves mode and statistics of the model as they were."""
    mode, buffers = model.training, {n: b.clone() for n, b in model.named_buffers()}
    try:
        yield
    finally:
        model.train(mode)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@contextmanager
def _stepped(
    trained: Mapping[str, nn.Parameter], direction: Mapping[str, Tensor], rate: float
) -> Iterator[None]:
    """The model a step further, and then exactly where it was."""
    before = {name: parameter.clone() for name, parameter in trained.items()}
    try:
        for name, parameter in trained.items():
            parameter.sub_(direction[name], alpha=rate)
        yield
    finally:
        for name, parameter in trained.items():
            parameter.copy_(before[name])
