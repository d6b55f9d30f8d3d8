"""Vision Transformers: their parts, for the attacks that are made for them."""

from __future__ import annotations

from torch import nn

from fedsim.core.anatomy import VitParts, vit_parts
from fedsim.core.errors import AttackError, ModelError


def transformer_parts(model: nn.Module, attack: str) -> VitParts:
    """The parts of a ViT; an error that names ``attack`` where it is no ViT."""
    try:
        return vit_parts(model)
    except ModelError as error:
        raise AttackError(f"{attack} attacks Vision Transformers: {error}") from error
