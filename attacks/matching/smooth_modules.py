"""Smooth modules: stand-ins that compute the same and suit first-order derivatives better.

A difference of two passes crosses kinks: a unit of a ReLU network that is on in one pass and off in
the other adds a jump that the derivative does not have. `KinkTape` keeps the choices of the first
pass (which units are on, which pixel a pooling takes) and has the second pass follow them. With its
choices fixed the network is smooth and has the same derivative.

`as_matrix` turns the patch projection of a ViT, whose kernel equals its stride, into the matrix
product that it is: the gradient in the images of so large a convolution is slow on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.anatomy import found_in, layer_of


class KinkTape:
    """The choices of one pass, in the order they were made."""

    def __init__(self) -> None:
        self.choices: list[Tensor] = []
        self.replaying = False
        self.used = False  # whether any module of the network writes on it
        self.at = 0

    def record(self) -> None:
        self.choices, self.replaying, self.at = [], False, 0

    def replay(self, choices: list[Tensor]) -> None:
        self.choices, self.replaying, self.at = choices, True, 0

    def keep(self, choice: Tensor) -> None:
        self.choices.append(choice.detach())

    def next(self) -> Tensor:
        self.at += 1
        return self.choices[self.at - 1]


class _Gate(torch.autograd.Function):
    """``x`` where a unit was on, 0 elsewhere: a ReLU with its choice fixed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on: Tensor) -> Tensor:
        ctx.save_for_backward(on)
        return torch.ops.aten.threshold_backward(x, on, 0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (on,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(outer[0], on, 0), None


class _TapedReLU(nn.Module):
    def __init__(self, tape: KinkTape):
        super().__init__()
        self.tape = tape

    def forward(self, x: Tensor) -> Tensor:
        if self.tape.replaying:
            result: Tensor = _Gate.apply(x, self.tape.next())
            return result
        y = F.relu(x)
        self.tape.keep(y)
        return y


class _TapedMaxPool(nn.Module):
    def __init__(self, pool: nn.MaxPool2d, tape: KinkTape):
        super().__init__()
        self.tape = tape
        self.options = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.tape.replaying:
            chosen = self.tape.next()
            return x.flatten(2).gather(2, chosen.flatten(2)).view(chosen.shape)
        y, chosen = F.max_pool2d(x, *self.options, return_indices=True)
        self.tape.keep(chosen)
        return y


def tape_kinks(model: nn.Module) -> KinkTape:
    """Put every ReLU and every max pooling of ``model`` on a tape."""
    tape = KinkTape()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.ReLU:
                tape.used = True
                setattr(parent, name, _TapedReLU(tape))
            elif type(child) is nn.MaxPool2d and not child.return_indices:
                tape.used = True
                setattr(parent, name, _TapedMaxPool(child, tape))
    return tape


class _PatchProjection(nn.Conv2d):
    """A convolution whose stride is its kernel, as a matrix product."""

    def forward(self, images: Tensor) -> Tensor:
        channels, p, q = self.weight.shape[1:]
        batch, _, height, width = images.shape
        rows, columns = height // p, width // q
        patches = (
            images[..., : rows * p, : columns * q]
            .reshape(batch, channels, rows, p, columns, q)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(batch, rows * columns, channels * p * q)
        )
        tokens = F.linear(patches, self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).reshape(batch, -1, rows, columns)


def as_matrix(model: nn.Module) -> None:
    """Make the patch projections of ``model`` matrix products."""
    for projection in _projections(model):
        if (
            type(projection) is nn.Conv2d
            and projection.kernel_size == projection.stride
            and projection.padding == (0, 0)
            and projection.groups == 1
        ):
            projection.__class__ = _PatchProjection  # all else of it stays as its owner reads it


def _projections(model: nn.Module) -> list[nn.Module]:
    found = found_in(model)
    if found is None:
        return [module.proj for module in model.modules() if isinstance(module, PatchEmbed)]
    return [layer_of(model, found.vit.patch_weight)] if found.vit else []
