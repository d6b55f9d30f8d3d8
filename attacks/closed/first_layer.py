"""First layer: the linear layer before a ReLU that reads the whole picture, if there is one.

Names and types say little in a network of one's own, and a ReLU may be called in `forward`. So a
picture goes through to find the layer that reads all of it, and gradients come back to see that the
layer's output has none exactly where it is negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.core.errors import AttackError, ModelError
from fedsim.core.passage import distinct, picture_of, projection_in, watched

_PICTURES = 4
_FLOWS = 0.95  # share of units that are on with a gradient: a few end in units that are off


@dataclass(frozen=True)
class FirstLayer:
    """Parameter names, and where in a picture each number lies that the layer reads; None: in
    order."""

    weight: str
    bias: str
    layout: tuple[int, ...] | None

    def fold(self, rows: Tensor, side: int) -> Tensor:
        """What the layer read (b, n), as pictures (b, 3, side, side)."""
        if self.layout is not None:
            rows = torch.empty_like(rows).index_copy_(1, torch.tensor(self.layout), rows)
        return rows.view(-1, 3, side, side)


def first_layer(model: nn.Module, side: int, attack: str) -> FirstLayer:
    """The first layer of a model, in the mode it is in; a model without one is an error."""
    try:
        twin = distinct(model)
        picture = picture_of(side)
        with watched(twin, picture) as calls:
            twin(picture)
    except ModelError as error:
        raise AttackError(f"{attack} cannot look into this model: {error}") from error
    projection = projection_in(calls, picture)
    begins = projection is not None and isinstance(projection.call.module, nn.Linear)
    if projection is None or not begins or projection.grid != (1, 1):
        raise AttackError(
            f"{attack} needs a network that begins with a linear layer on the whole picture; a "
            f"{type(model).__name__} begins otherwise."
        )
    layer = projection.call.module
    names = {id(parameter): name for name, parameter in twin.named_parameters()}
    weight, bias = names.get(id(layer.weight)), names.get(id(layer.bias))
    if weight is None or bias is None:
        what = "weights are made of other parameters" if weight is None else "layer has no bias"
        raise AttackError(
            f"{attack} needs the gradients of a first layer's weight and of its bias, which sets "
            f"the scale; in a {type(model).__name__} its {what}."
        )
    if not _is_relu(twin.train(model.training), twin.get_submodule(projection.call.name), picture):
        raise AttackError(
            f"{attack} needs a ReLU right behind '{projection.call.name}', and nothing random "
            f"before or beside it; a {type(model).__name__} has another activation, a norm or a "
            f"dropout there."
        )
    return FirstLayer(weight, bias, projection.layout)


def gradients_at(model: nn.Module, layer: nn.Module, images: Tensor, pull: Tensor) -> Gradients:
    """What a layer read and gave of ``images``, and the gradient of ``<pull, logits>`` in that."""
    seen: list[Tensor] = []
    pulled: list[Tensor] = []

    def watch(_: nn.Module, given: tuple[Tensor, ...], gave: Tensor) -> None:
        seen.extend((given[0].detach().clone(), gave.detach().clone()))  # a ReLU may be in place
        gave.register_hook(lambda gradient: pulled.append(gradient.detach().clone()))

    handle = layer.register_forward_hook(watch)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits = model(images)
            (logits * pull).sum().backward()
    finally:
        handle.remove()
    model.zero_grad(set_to_none=True)
    gradient = pulled[0] if pulled else torch.zeros_like(seen[1])
    return Gradients(seen[0], seen[1], gradient, logits.detach())


@dataclass(frozen=True)
class Gradients:
    """Of one layer: what it read and gave, the gradient in that; and the model's logits."""

    read: Tensor
    gave: Tensor
    gradient: Tensor
    logits: Tensor


def _is_relu(twin: nn.Module, layer: nn.Module, picture: Tensor) -> bool:
    """Whether the gradient in the layer's output is zero just where that is negative."""
    for parameter in twin.parameters():
        parameter.requires_grad_(True)
    coin = torch.Generator().manual_seed(0)
    images = 3 * torch.randn(_PICTURES, *picture.shape[1:], generator=coin)
    classes = twin(picture.repeat(_PICTURES, 1, 1, 1)).shape[1]
    pull = torch.randn(_PICTURES, classes, generator=coin)
    at = gradients_at(twin, layer, images, pull)
    if not torch.equal(at.read.flatten().sort().values, images.flatten().sort().values):
        return False  # a dropout or a noise on the picture
    off = at.gave <= 0
    flows = at.gradient != 0
    if bool(flows[off].any()) or not bool((~off).any()):
        return False
    return float(flows[~off].double().mean()) > _FLOWS
