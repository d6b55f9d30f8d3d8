"""Passage: a picture on its way through a network, and what each layer read and gave of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.anatomy import bare, own
from fedsim.core.errors import ModelError

CLOSE = 1e-5


@dataclass(frozen=True)
class Call:
    """One layer at work: what it read and what it gave."""

    name: str
    module: nn.Module
    read: Tensor
    gave: Tensor


@dataclass(frozen=True)
class Projection:
    """The layer that reads patches: its tokens (N, D), their grid, and how a patch is read."""

    call: Call
    tokens: Tensor
    grid: tuple[int, int]
    patch: tuple[int, int]
    layout: tuple[int, ...] | None = None


def distinct(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose tensors are told apart by their values: those that begin as zeros
    or ones as well, and a norm that would do nothing does something."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(f"a {type(model).__name__} without numbers cannot be looked into.")
    try:
        twin = copy.deepcopy(model).eval()
    except Exception as error:  # somebody's own tensors or handles
        raise ModelError(f"a {type(model).__name__} cannot be copied: {error}") from error
    coin = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if bool((tensor == tensor.flatten()[0]).all()):
                noise = torch.randn(tensor.shape, generator=coin, dtype=torch.float32)
                tensor.add_(0.01 * noise.to(tensor))
    return twin


def picture_of(side: int, which: int = 0) -> Tensor:
    """A picture (1, 3, side, side) no two numbers of which are equal."""
    count = 3 * side * side
    order = torch.randperm(count, generator=torch.Generator().manual_seed(which))
    return (2 * order.float() / count - 1).view(1, 3, side, side)


_LAYERS = nn.Conv2d | nn.Linear | nn.LayerNorm | nn.MultiheadAttention


@contextmanager
def watched(model: nn.Module, picture: Tensor) -> Iterator[list[Call]]:
    """Every call of a layer, in the order of their ends, as it was then: what comes after may add
    to it in place. Of convolutions, those of the ``picture`` alone. A layer with an adapter around
    it gives what the two give together."""
    calls: list[Call] = []
    layers: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, module in model.named_modules():
        place, layer = bare(name, module)
        if layer is not None and own(place) and place not in layers:
            layers[place] = (module, layer)

    def note(name: str, layer: nn.Module, given: Any, named: Mapping[str, Any], gave: Any) -> None:
        read = next((t for t in (*given, *named.values()) if isinstance(t, Tensor)), None)
        gave = gave[0] if isinstance(gave, tuple) else gave
        if read is None or not isinstance(gave, Tensor):
            return
        if not isinstance(layer, nn.Conv2d) or read.shape == picture.shape:
            calls.append(Call(name, layer, read.detach().clone(), gave.detach().clone()))

    hooks = [
        module.register_forward_hook(
            lambda _, given, named, gave, name=name, layer=layer: note(
                name, layer, given, named, gave
            ),
            with_kwargs=True,
        )
        for name, (module, layer) in layers.items()
        if isinstance(layer, _LAYERS) or not [*layer.children()]
    ]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which would pass the layers by
    try:
        with torch.no_grad():
            yield calls
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for hook in hooks:
            hook.remove()


def projection_in(calls: Sequence[Call], picture: Tensor) -> Projection | None:
    for call in calls:
        found = (
            _by_convolution(call, picture)
            if isinstance(call.module, nn.Conv2d)
            else _by_linear(call, picture)
            if isinstance(call.module, nn.Linear)
            else None
        )
        if found is not None:
            return found
    return None


def _by_convolution(call: Call, picture: Tensor) -> Projection | None:
    layer = call.module
    assert isinstance(layer, nn.Conv2d)
    if call.read.shape != picture.shape or not torch.equal(call.read, picture):
        return None
    p, q = layer.kernel_size
    plain = layer.padding in ((0, 0), "valid") and layer.dilation == (1, 1) and layer.groups == 1
    if layer.stride != (p, q) or p * q == 1 or not plain:
        return None
    rows, columns = call.gave.shape[-2:]
    tokens = call.gave.flatten(2)[0].T
    return Projection(call, tokens, (int(rows), int(columns)), (int(p), int(q)))


def _by_linear(call: Call, picture: Tensor) -> Projection | None:
    """A linear layer that reads every patch as a row of its numbers, in whatever order."""
    read = call.read.reshape(-1, call.read.shape[-1])
    side, pixels = picture.shape[-1], read.shape[1]
    p = round((pixels / 3) ** 0.5)
    if read.numel() != picture.numel() or 3 * p * p != pixels or side % p:
        return None
    values, places = picture.flatten().sort()
    found = torch.searchsorted(values, read.contiguous()).clamp(max=len(values) - 1)
    if not torch.equal(values[found], read):
        return None
    flat = places[found]  # (N, P): where in the picture each number lies
    channel, y, x = flat // side**2, flat // side % side, flat % side
    across = side // p
    if not torch.equal(y // p * across + x // p, torch.arange(len(read))[:, None].expand_as(flat)):
        return None
    within = channel * p * p + y % p * p + x % p
    if not torch.equal(within, within[:1].expand_as(within)):
        return None
    tokens = call.gave.reshape(-1, call.gave.shape[-1])
    return Projection(call, tokens, (across, across), (p, p), tuple(within[0].tolist()))


def alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= CLOSE * (1 + other.abs().max()))
