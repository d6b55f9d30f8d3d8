"""Dropout as a defense: numbers inside the network are left out at random while a client learns.

Proposed as a layer before the classifier, of the rate 0.5; known to be broken. Scheliga et al. 2023
("Dropout is not all you need to prevent gradient leakage") search the masks together with the
pictures. What is done about it here is less, and more exact where it applies: of one picture the
mask before the head is *read*, because the columns of the head's gradient are zero where it is.
Other masks are not searched: the server matches by the network without dropout, which is its
expectation. Closed forms do not care: dropout behind the embedding leaves  dW = G^T X  as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.anatomy import head_names, vit_parts
from fedsim.core.defense import Defense, Informed
from fedsim.core.errors import ModelError
from fedsim.defenses.dice import After, Before, Dice, head_of, refuse_adapted_head

Place = Literal["head", "blocks", "embedding"]
_DICE = "_dropout_dice"


@dataclass(frozen=True)
class Dropout(Defense):
    """``rate``: the share that is left out; the rest grows to make up for it. ``places``: before
    the ``head``, after each of the ``blocks`` (of a convolutional network, its stages), and of a
    ViT's tokens behind the ``embedding``. Masks are drawn whatever ``train.mode`` says, and by the
    client alone: nobody else's copy of the model leaves anything out."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.5
    places: Annotated[list[Place], Field(min_length=1)] = field(default_factory=lambda: ["head"])

    def prepare_model(self, model: nn.Module) -> nn.Module:
        dice = Dice()
        object.__setattr__(model, _DICE, dice)
        if "embedding" in self.places:
            _tokens_of(model).register_forward_pre_hook(Before(Leave(self.rate, dice)))
        if "blocks" in self.places:
            for block in _blocks_of(model):
                block.register_forward_hook(After(Leave(self.rate, dice)))
        if "head" in self.places:
            leave = Leave(self.rate, dice, readable=True)
            head_of(model, "dropout").register_forward_pre_hook(Before(leave))
        return model

    def check_trained(self, model: nn.Module) -> None:
        if "head" in self.places:
            refuse_adapted_head(model, "dropout")

    def toss(self, model: nn.Module, rng: torch.Generator) -> None:
        dice_of(model).take(rng)

    def tossed(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        return dice_of(model).proven()

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Where one picture was learned from once, a feature that was left out has a column of
        zeros in the head's gradient: match with that mask. Else match with nothing left out."""
        mask, words = self._read(seen, model)
        dice_of(model).read = mask
        return replace(seen, notes=(*seen.notes, f"dropout: {words}"))

    def _read(self, seen: Informed, model: nn.Module) -> tuple[Tensor | None, str]:
        """The mask before the head (D,), None where it cannot be told, and that in words."""
        name = head_names(model)[0]
        if "head" not in self.places:
            return None, "its masks cannot be read; matched without"
        if seen.update.num_examples != 1 or seen.masked or name not in seen.update.tensors:
            return None, "the mask before the head cannot be read; matched without"
        kept = (seen.update.tensors[name] != 0).any(0)
        if bool(kept.all()) or not bool(kept.any()):  # noise, or nothing at all
            return None, "the mask before the head cannot be read; matched without"
        rest = "" if self.places == ["head"] else ", and those of other places are not"
        words = f"the mask before the head ({int((~kept).sum())} of {len(kept)}) is read"
        return kept.to(model.get_parameter(name).device), words + rest


@dataclass
class Leave:
    """What leaves numbers out at one place; ``readable``: a server can read the mask there."""

    rate: float
    dice: Dice
    readable: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.dice.rng is not None:  # on the CPU, so that a seed is the same mask on all devices
            kept = torch.rand(x.shape, generator=self.dice.rng) >= self.rate
        elif self.readable and self.dice.read is not None:
            kept = self.dice.read
        else:
            return x
        left = x * kept.to(x) / (1 - self.rate)
        self.dice.note(x, left)
        return left


def dice_of(model: nn.Module) -> Dice:
    """The state that `Dropout.prepare_model` gave the model."""
    dice: Dice = vars(model)[_DICE]
    return dice


def _tokens_of(model: nn.Module) -> nn.Module:
    """The layer that reads a ViT's tokens, positions included."""
    try:
        blocks = vit_parts(model).blocks
    except ModelError as error:
        raise ModelError(f"dropout finds no embedding of patches: {error}") from error
    if not blocks:
        raise ModelError("dropout finds no block that reads the embedding of this model.")
    return model.get_submodule(blocks[0])


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """A ViT's blocks; of another network its stages, or its convolutions where it has none."""
    try:
        found = [model.get_submodule(name) for name in vit_parts(model).blocks]
    except ModelError:
        head = head_of(model, "dropout")
        inner = [child for child in _with_parameters(model) if child is not head]
        stages = [child for child in inner if any(True for _ in _with_parameters(child))]
        found = stages or [child for child in inner if isinstance(child, nn.Conv2d)]
    if not found:
        raise ModelError("dropout finds no blocks in this model; name other places.")
    return found


def _with_parameters(model: nn.Module) -> Iterator[nn.Module]:
    return (child for child in model.children() if any(True for _ in child.parameters()))
