"""Inverting Gradients (Geiping et al. 2020): find images whose gradient points the same way.

Minimises 1 - cos(g(x), g*) + a TV(x) over the pixels, cosine over all parameters at once
(their Eq. 4), with signed Adam steps, inside the box of valid images. The best iterate is the
one that fits the observed update best.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.labels import recover_labels
from attacks.priors import total_variation
from fedsim.core.attack import Progress, Reconstruction
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Protocol, Update


@dataclass(frozen=True)
class InvertingGradients:
    """The authors run 4,800 to 24,000 steps; the default here is a CPU's budget."""

    needs: ClassVar[frozenset[str]] = frozenset(
        {"update", "weights", "architecture", "image_size", "normalisation", "batch_size"}
    )

    steps: Annotated[int, Field(ge=1)] = 400
    lr: Annotated[float, Field(gt=0)] = 0.1
    tv: Annotated[float, Field(ge=0)] = 0.1
    signed: bool = True

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        model = view.model().to(device)
        protocol = view.single_step()
        batch, side = view.batch_size, view.image_size
        target, notes = _target(view.update, device)
        if view.grants("oracle_labels"):
            labels = view.oracle_labels
        else:
            labels = recover_labels(view.update, model, batch)
        labels = labels.to(device)

        images = torch.rand(batch, 3, side, side, generator=view.generator()).to(device)
        images.requires_grad_(True)
        optimizer = torch.optim.Adam([images], lr=self.lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [self.steps * k // 8 for k in (3, 5, 7)], gamma=0.1
        )
        best, best_loss = images.detach().clone(), torch.tensor(float("inf"), device=device)
        trace: list[tuple[int, float]] = []
        every = max(1, self.steps // 50)
        with _twice_differentiable(model):
            for step in range(1, self.steps + 1):
                distance = cosine_distance(model, images, labels, target, protocol)
                loss = distance + self.tv * total_variation(images)
                (images.grad,) = torch.autograd.grad(loss, images)
                with torch.no_grad():
                    better = loss < best_loss
                    best = torch.where(better, images, best)
                    best_loss = torch.where(better, loss, best_loss)
                    if self.signed:
                        images.grad.sign_()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    images.clamp_(0, 1)
                if step % every == 0 or step == self.steps:
                    value = float(loss.detach())
                    trace.append((step, value))
                    progress(step, self.steps, value)
        if not bool(torch.isfinite(best_loss)):
            raise AttackError("the matching loss was never finite.")
        return Reconstruction(
            images=best.cpu(),
            labels=labels.cpu(),
            loss=float(best_loss),
            trace=trace,
            notes=notes,
        )


def _target(update: Update, device: torch.device) -> tuple[dict[str, Tensor], list[str]]:
    """The direction to match, by parameter, and what that leaves out."""
    sign = -1.0 if update.kind == "delta" else 1.0
    notes = []
    if update.kind == "delta":
        notes.append("a weight delta is matched as if it were one gradient step")
    target = {name: sign * t.to(device) for name, t in update.tensors.items()}
    if not all(bool(torch.isfinite(t).all()) for t in target.values()):
        raise AttackError("the update holds numbers that are not finite.")
    return target, notes


def cosine_distance(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    target: dict[str, Tensor],
    protocol: Protocol,
) -> Tensor:
    """1 - cos between the gradient of these images and ``target``, over all its parameters."""
    parameters = dict(model.named_parameters())
    named = [(parameters[name], wanted) for name, wanted in target.items()]
    loss = F.cross_entropy(model(protocol.normalise(images)), labels)
    gradients = torch.autograd.grad(loss, [p for p, _ in named], create_graph=True)
    pairs = [(g, wanted) for g, (_, wanted) in zip(gradients, named, strict=True)]
    dot = torch.stack([(g * wanted).sum() for g, wanted in pairs]).sum()
    own = torch.stack([g.square().sum() for g, _ in pairs]).sum().sqrt()
    other = torch.stack([wanted.square().sum() for _, wanted in pairs]).sum().sqrt()
    return 1 - dot / (own * other).clamp(min=1e-20)


@contextlib.contextmanager
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Fused attention has no second derivative: use the plain one meanwhile."""
    fused = [m for m in model.modules() if isinstance(m, Attention) and m.fused_attn]
    for module in fused:
        module.__dict__["fused_attn"] = False
    try:
        yield
    finally:
        for module in fused:
            module.__dict__["fused_attn"] = True
