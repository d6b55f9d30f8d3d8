"""Defaults: the attacks of an audit that names none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from fedsim.captures.part import head_weight
from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import ModelError

FEW_PICTURES = 64  # that are learned from in a round
SEARCH_STEPS, FEWEST_STEPS = 300, 10


def default_attacks(
    train: Mapping[str, Any], counts: list[int], model: nn.Module
) -> list[dict[str, Any]]:
    """The attacks where none is named: for a Vision Transformer the closed form, and for every
    model a search, which reads labels first. Where a part is trained, a closed form that lacks
    what it needs is left out, and `features` reads the head. Of an update with many pictures behind
    it a search makes nothing at a budget that anybody waits for, so it takes the fewest steps that
    show that.
    """
    steps = train.get("local_steps") or 0
    pictures = steps * int(train["batch_size"]) or max(counts, default=int(train["batch_size"]))
    few = pictures * (train.get("local_epochs") or 1) <= FEW_PICTURES
    budget = SEARCH_STEPS if few else FEWEST_STEPS
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    direct = ["patch_solve"] if _embeds(model, free) else []
    if len(free) < len([*model.parameters()]) and head_weight(model) in free:
        direct.append("features")
    return [*({"name": name} for name in direct), {"name": "inverting_gradients", "steps": budget}]


def _embeds(model: nn.Module, free: Collection[str]) -> bool:
    """Whether positions of a Vision Transformer are trained, and the patch projection or an adapter
    on it."""
    try:
        parts = vit_parts(model)
    except ModelError:
        return False
    if all(parameter.requires_grad for parameter in model.parameters()):
        return True
    patches = parts.patch_weight.removesuffix(".weight").removesuffix(".base_layer")
    return parts.position in free and any(name.startswith(f"{patches}.") for name in free)
