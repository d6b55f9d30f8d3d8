"""DP-SGD (Abadi et al. 2016): every sample's gradient clipped, then noise on their sum.

Per-sample gradients come from `torch.func`, which covers raw parameters such as class tokens and
position embeddings; opacus' hooks do not. The budget is counted by opacus' accountant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedsim.core.anatomy import batchnorm_names
from fedsim.core.defense import Budget, Defense, Exposure
from fedsim.core.errors import ModelError
from fedsim.defenses.accounting import spent

CHUNK = 16  # samples whose gradients are held at once


@dataclass(frozen=True)
class DpSgd(Defense):
    """``clip``: the largest norm of a sample's gradient; ``noise``: the noise on their sum, as a
    multiple of ``clip``; ``delta``: of the budget that is reported."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    noise: Annotated[float, Field(ge=0)] = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    def prepare_model(self, model: nn.Module) -> nn.Module:
        names = batchnorm_names(model)
        if names:
            raise ModelError(
                f"dp_sgd cannot protect a model with BatchNorm ('{names[0]}' mixes the samples of "
                f"a batch); use one with GroupNorm or LayerNorm."
            )
        return model

    def batch_gradient(
        self, model: nn.Module, images: Tensor, labels: Tensor, rng: torch.Generator
    ) -> dict[str, Tensor]:
        trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
        fixed |= dict(model.named_buffers())

        def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, fixed | weights, (image[None],))
            return F.cross_entropy(logits, label[None])

        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        each = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
        for at in range(0, len(images), CHUNK):
            gradients = each(trained, images[at : at + CHUNK], labels[at : at + CHUNK])
            for name, summed in _clipped_sum(gradients, self.clip).items():
                total[name] += summed
        return {
            name: (t + self.noise * self.clip * torch.randn(t.shape, generator=rng).to(t))
            / len(images)
            for name, t in total.items()
        }

    def budget(self, exposure: Exposure) -> Budget:
        epsilon = self.epsilon(min(1.0, exposure.rate), exposure.steps)
        return Budget(epsilon, self.delta, "one sample of a client")

    def epsilon(self, rate: float, steps: int) -> float:
        """The budget spent after ``steps`` noisy sums, of which each sample is in a share ``rate``
        (opacus' accountant on Renyi divergences)."""
        return spent(self.noise, rate, steps, self.delta)


def _clipped_sum(gradients: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    """The sum of per-sample gradients (B, ...), each scaled to a norm of at most ``clip``."""
    norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    scale = (clip / norms.clamp(min=1e-30)).clamp(max=1.0)
    return {name: torch.einsum("b,b...->...", scale, g) for name, g in gradients.items()}
