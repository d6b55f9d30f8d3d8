"""Frozen position embedding (the advice of APRIL, Lu et al. 2022): it is never trained, so its
gradient is never uploaded. It costs nothing to compute; the model keeps its initial positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.core.anatomy import tensor_of, vit_parts
from fedsim.core.defense import Defense
from fedsim.core.errors import ModelError


@dataclass(frozen=True)
class FrozenPE(Defense):
    """Takes the position embedding out of training."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        position = vit_parts(model).position
        if position is None:
            raise ModelError("frozen_pe needs a model with a position embedding; this has none.")
        tensor_of(model, position).requires_grad_(False)
        return model
