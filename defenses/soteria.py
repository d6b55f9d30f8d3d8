"""Soteria (Sun et al. 2021): the head's gradient without the features that tell most of the input.

A feature r_i that moves much with the input for its size, |dr_i/dx| / |r_i|, is one from which the
input can be read; its column in the head's gradient is set to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedsim.core.anatomy import head_names, layer_of
from fedsim.core.defense import Defense
from fedsim.core.errors import ModelError


@dataclass(frozen=True)
class Soteria(Defense):
    """``ratio``: the share of features that is left out, the most telling first. ``probes`` random
    directions estimate how much each one moves."""

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.4
    probes: Annotated[int, Field(ge=1)] = 16

    def check_trained(self, model: nn.Module) -> None:
        head = head_names(model)[0]
        if not model.get_parameter(head).requires_grad:
            raise ModelError(
                f"soteria hides features in the gradient of the head ('{head}'), which nobody "
                f"trains here (train.trainable), so it would do nothing; leave it out."
            )

    def batch_gradient(
        self, model: nn.Module, images: Tensor, labels: Tensor, rng: torch.Generator
    ) -> dict[str, Tensor]:
        head = head_names(model)[0]
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        features: list[Tensor] = []
        module = layer_of(model, head)
        handle = module.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        try:
            x = images.detach().requires_grad_(True)
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
                loss = F.cross_entropy(model(x), labels)
        finally:
            handle.remove()
        if not features or features[0].dim() != 2:
            raise ModelError(
                "soteria needs a head that reads one row of features for each picture."
            )
        sensitivity = self._sensitivity(features[0], x, rng)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradient = {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(trained.items(), gradients, strict=True)
        }
        if head in gradient:
            hidden = sensitivity.topk(max(1, round(self.ratio * len(sensitivity)))).indices
            gradient[head] = gradient[head].index_fill(1, hidden, 0.0)
        return gradient

    def _sensitivity(self, features: Tensor, x: Tensor, rng: torch.Generator) -> Tensor:
        """|dr_i/dx| / |r_i| of every feature, (D,), over the batch.

        The norm of row i of the Jacobian is the deviation of (J v)_i over random directions v. J v
        comes from two backward passes: of u -> J^T u, which is linear in u.
        """
        u = torch.zeros_like(features, requires_grad=True)
        (back,) = torch.autograd.grad(features, x, u, create_graph=True)
        total = torch.zeros(features.shape[-1], device=x.device, dtype=x.dtype)
        for _ in range(self.probes):
            v = torch.randn(x.shape, generator=rng).to(x)
            (moved,) = torch.autograd.grad(back, u, v, retain_graph=True)
            total += moved.square().mean(0)
        return (total / self.probes).sqrt() / features.detach().abs().mean(0).clamp(min=1e-8)
