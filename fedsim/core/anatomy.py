"""Anatomy: where a model keeps its parts.

Parts are found by type and by name, so that an attack can speak of "the patch projection" or "the
head" on every Vision Transformer and ResNet that timm builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.core.errors import ModelError


@dataclass(frozen=True)
class VitParts:
    """Parameter names of a Vision Transformer's parts, and the geometry of its tokens."""

    patch_weight: str
    patch_bias: str | None
    position: str | None
    cls_token: str | None
    blocks: tuple[str, ...]  # module names, in order
    head_weight: str
    head_bias: str | None
    grid: tuple[int, int]  # patches down, patches across
    patch_size: tuple[int, int]
    prefix_tokens: int  # rows of the position embedding that belong to no patch
    unknown: str | None = None  # the embedding used where a position is hidden

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]


def vit_parts(model: nn.Module) -> VitParts:
    """Where ``model`` keeps its patch projection, position embedding, blocks and head."""
    embeds = [(n, m) for n, m in model.named_modules() if isinstance(m, PatchEmbed)]
    if not embeds:
        raise ModelError(f"a {type(model).__name__} has no patch embedding: it is no ViT.")
    name, embed = embeds[0]
    projection = embed.proj
    if not isinstance(projection, nn.Conv2d):
        raise ModelError(f"the patch projection of {type(model).__name__} is no convolution.")
    if embed.grid_size is None:
        raise ModelError(f"{type(model).__name__} has no fixed patch grid.")
    grid = (int(embed.grid_size[0]), int(embed.grid_size[1]))
    parameters = dict(model.named_parameters())
    position = _named(parameters, "pos_embed")
    prefix = 0
    if position is not None:
        prefix = parameters[position].shape[-2] - grid[0] * grid[1]
    head_weight, head_bias = _head(model)
    return VitParts(
        patch_weight=f"{name}.proj.weight",
        patch_bias=f"{name}.proj.bias" if projection.bias is not None else None,
        position=position,
        cls_token=_named(parameters, "cls_token"),
        blocks=_blocks(model),
        head_weight=head_weight,
        head_bias=head_bias,
        grid=grid,
        patch_size=(int(projection.kernel_size[0]), int(projection.kernel_size[1])),
        prefix_tokens=prefix,
        unknown=_named(parameters, "unk_embed"),
    )


def _named(parameters: Mapping[str, Tensor], last: str) -> str | None:
    return next((n for n in parameters if n.split(".")[-1] == last), None)


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """All blocks from the input on; those of a Swin stand in stages."""
    return tuple(
        f"{name}.{index}"
        for name, module in model.named_modules()
        if name.split(".")[-1] == "blocks" and isinstance(module, nn.Sequential | nn.ModuleList)
        for index in range(len(module))
    )


@dataclass(frozen=True)
class ResNetParts:
    """Names of a convolutional network's BatchNorm layers (in order) and of its head."""

    batchnorms: tuple[str, ...]
    head_weight: str
    head_bias: str | None


def resnet_parts(model: nn.Module) -> ResNetParts:
    weight, bias = _head(model)
    return ResNetParts(batchnorm_names(model), weight, bias)


def batchnorm_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, m in model.named_modules() if isinstance(m, _BatchNorm))


def head_names(model: nn.Module) -> list[str]:
    """Parameter names of the classifier: weight, then bias where it has one."""
    weight, bias = _head(model)
    return [weight] if bias is None else [weight, bias]


def _head(model: nn.Module) -> tuple[str, str | None]:
    getter = getattr(model, "get_classifier", None)
    head = getter() if getter is not None else None
    if not isinstance(head, nn.Linear):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        if not linears:
            raise ModelError(f"{type(model).__name__} has no linear head.")
        head = linears[-1]
    name = next(n for n, m in model.named_modules() if m is head)
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", f"{prefix}bias" if head.bias is not None else None
