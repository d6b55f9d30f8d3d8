"""Dice: a client's coin inside its model, for defenses that draw while the network computes.

The server builds the same network. Its copy has no coin, and computes what is drawn around; what it
reads of the client's draw from an update, it can lay into its copy instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.anatomy import head_names, layer_of
from fedsim.core.errors import ModelError


@dataclass
class Dice:
    """``rng``: the client's coin, in its own model alone; ``read``: what a server read of a draw;
    ``proof``: what the first draw of a step changed, before and after; ``beside``: a term of the
    client's loss that came of a draw."""

    rng: torch.Generator | None = None
    read: Tensor | None = None
    proof: tuple[Tensor, Tensor] | None = None
    noting: bool = False
    beside: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Dice:
        """A copy of a model has no coin."""
        return Dice(read=self.read)

    def take(self, rng: torch.Generator) -> None:
        """Draw by this coin from now on."""
        self.rng, self.noting = rng, True
        self.read = self.proof = self.beside = None

    def note(self, before: Tensor, after: Tensor) -> None:
        """Keep what the first draw of a step changed."""
        if self.noting:
            self.proof, self.noting = (before.detach(), after.detach()), False

    def proven(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """What the first draw changed, once."""
        proof, self.proof, self.noting = self.proof, None, False
        return None if proof is None else ({"features": proof[0]}, {"features": proof[1]})


@dataclass
class Before:
    """A hook that changes what a layer reads; an object, so that copies of a model have theirs."""

    change: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if not given or not isinstance(given[0], Tensor):
            raise ModelError(f"a {type(module).__name__} is not called with what it reads first.")
        return (self.change(given[0]), *given[1:])


@dataclass
class After:
    """A hook that changes what a layer gives."""

    change: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, given: tuple[Any, ...], gave: Any) -> Any:
        if isinstance(gave, tuple):
            return (self.change(gave[0]), *gave[1:])
        return self.change(gave)


def head_of(model: nn.Module, defense: str) -> nn.Linear:
    """The layer that gives the logits."""
    layer = layer_of(model, head_names(model)[0])
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{defense} stands before a linear head, and this model has none.")
    return layer


def refuse_adapted_head(model: nn.Module, defense: str) -> None:
    """Raise where the head has an adapter, which would read past what stands before the head."""
    if ".base_layer." in head_names(model)[0]:
        raise ModelError(
            f"{defense} stands before the head, and the head's adapter would read past it; leave "
            f"the head out of train.lora.targets."
        )
