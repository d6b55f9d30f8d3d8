"""Vision Transformers: their parts, as the attacks that are made for them ask."""

from __future__ import annotations

from torch import nn

from fedsim.core.errors import AttackError, ModelError
from fedsim.core.models import VitParts, vit_parts


def transformer_parts(model: nn.Module, attack: str) -> VitParts:
    """The parts of a ViT, or one sentence of ``attack`` why there are none."""
    try:
        return vit_parts(model)
    except ModelError as error:
        raise AttackError(f"{attack} attacks Vision Transformers: {error}") from error
