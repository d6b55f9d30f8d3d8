"""Vision Transformers: their parts, for the attacks that are made for them."""

from __future__ import annotations

from torch import Tensor, nn

from fedsim.core.anatomy import VitParts, head_names, vit_parts
from fedsim.core.dissection import Added, added
from fedsim.core.errors import AttackError, ModelError


def transformer_parts(model: nn.Module, attack: str) -> VitParts:
    """The parts of a ViT; an error that names ``attack`` where it is no ViT."""
    try:
        return vit_parts(model)
    except ModelError as error:
        raise AttackError(f"{attack} attacks Vision Transformers: {error}") from error


def measured(model: nn.Module, side: int, attack: str) -> Added:
    """What a model of somebody's own makes of its patches' tokens, with the weights it was sent."""
    found = added(model, side)
    if found is None:
        raise AttackError(
            f"{attack}: with the weights of this round, what a {type(model).__name__} does to its "
            f"patches before it reads them is more than a product and a sum."
        )
    return found


def refuse_zeros(gradient: Tensor, what: str, model: nn.Module, attack: str) -> None:
    """Raise where a part's gradient is zero, and say why where it is plain: a head of zeros, as
    torchvision's builders make it, sends nothing back until it has been trained for a step."""
    if bool(gradient.any()):
        return
    try:
        zeros = not bool(model.get_parameter(head_names(model)[0]).any())
    except ModelError:
        zeros = False
    why = " (the head's weights are all zero in this round: look at a later one)" if zeros else ""
    raise AttackError(f"{attack}: {what} gradient is zero, so there is nothing to solve{why}.")
