"""Anatomy: where a model keeps its parts.

Parts are found by type and by name in what timm builds, so that an attack can speak of "the patch
projection" or "the head" of every Vision Transformer and ResNet. What somebody else wrote is
dissected when it is built (`fedsim.core.dissection`), and remembers what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.core.errors import ModelError


@dataclass(frozen=True)
class FirstAttention:
    """The layers that read every token first: the names of their norm, where one stands before
    them, and of their weights and biases, joint or one by one."""

    norm: str | None
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]


@dataclass(frozen=True)
class VitParts:
    """Parameter names of a Vision Transformer's parts, and the geometry of its tokens."""

    patch_weight: str
    patch_bias: str | None
    position: str | None
    cls_token: str | None
    blocks: tuple[str, ...]  # module names, in order
    head_weight: str | None  # None: no one linear layer gives the logits
    head_bias: str | None
    grid: tuple[int, int]  # patches down, patches across
    patch_size: tuple[int, int]
    prefix_tokens: int  # rows of the position embedding before those of the patches
    unknown: str | None = None  # the embedding used where a position is hidden
    attention: FirstAttention | None = None
    # Where in a patch, channel first, each number that the projection reads lies; None: in order.
    layout: tuple[int, ...] | None = None
    length: int | None = None  # tokens in all, where some have no position; None: no others
    upright: bool = False  # positions lie as a picture's pixels do, (1, D, rows, columns)
    # Whether what is added to the patches can be measured at work (`fedsim.core.dissection`), and
    # whether patches are multiplied by a number before that.
    measurable: bool = False
    gained: bool = False

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def sequence(self) -> int:
        """Tokens that the first attention reads."""
        return self.length or self.tokens + self.prefix_tokens

    def rows_of(self, positions: Tensor) -> Tensor:
        """The patches' rows (N, D) of a table of positions, or of its gradient: a view of it."""
        if self.upright:
            return positions.reshape(-1, self.tokens).T
        rows = positions.reshape(-1, positions.shape[-1])
        return rows[self.prefix_tokens : self.prefix_tokens + self.tokens]

    def is_plain(self, positions: Tensor) -> bool:
        """Whether a table of positions ends with the patches' rows, as timm's do."""
        rows = positions.numel() // positions.shape[-1]
        return not self.upright and rows == self.prefix_tokens + self.tokens


@dataclass(frozen=True)
class Found:
    """What a dissection found: the head, how many classes it tells, the parts of a ViT, or why it
    is none, and whether the model tosses coins while it is trained."""

    head: tuple[str, str | None] | None
    classes: int
    vit: VitParts | None
    why: str = ""
    tosses: bool = False

    def within(self, name: str) -> Found:
        """The same, of a model that holds the dissected one as its module ``name``."""
        return self.renamed(lambda inner: f"{name}.{inner}")

    def renamed(self, there: Callable[[str], str]) -> Found:
        """The same, of a model whose modules and parameters have other names."""
        weight, bias = self.head or ("", None)
        head = (there(weight), bias and there(bias)) if self.head else None
        return replace(self, head=head, vit=self.vit and _moved(self.vit, there))


NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm)
_FOUND = "_fedsim_found"  # on a model that was dissected; its copies have it too
UNKNOWN = "unk_embed"  # last in the name of the embedding that stands where a position is hidden


def remember(model: nn.Module, found: Found) -> None:
    """Keep with a model what its dissection found."""
    object.__setattr__(model, _FOUND, found)


def found_in(model: nn.Module) -> Found | None:
    """What the dissection of a model found; None where timm built it."""
    found = getattr(model, _FOUND, None)
    return found if isinstance(found, Found) else None


def vit_parts(model: nn.Module) -> VitParts:
    """Where ``model`` keeps its patch projection, position embedding, blocks and head."""
    if (found := found_in(model)) is not None:
        if found.vit is None:
            raise ModelError(found.why)
        unknown = _named(dict(model.named_parameters()), UNKNOWN)
        return replace(found.vit, unknown=unknown)
    from timm.layers import PatchEmbed  # seconds, which not everybody who learns needs to wait for

    embeds = [(n, m) for n, m in model.named_modules() if isinstance(m, PatchEmbed)]
    if not embeds:
        raise ModelError(f"a {type(model).__name__} has no patch embedding: it is no ViT.")
    name, embed = embeds[0]
    place, projection = bare(f"{name}.proj", embed.proj)
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
    blocks = _blocks(model)
    others = getattr(model, "num_prefix_tokens", None)  # timm's: registers have no position
    return VitParts(
        patch_weight=f"{place}.weight",
        patch_bias=f"{place}.bias" if projection.bias is not None else None,
        position=position,
        cls_token=_named(parameters, "cls_token"),
        blocks=blocks,
        head_weight=head_weight,
        head_bias=head_bias,
        grid=grid,
        patch_size=(int(projection.kernel_size[0]), int(projection.kernel_size[1])),
        prefix_tokens=prefix,
        unknown=_named(parameters, UNKNOWN),
        attention=_first_attention(model, blocks),
        length=grid[0] * grid[1] + others if isinstance(others, int) else None,
    )


def own(name: str) -> bool:
    """Whether a parameter or module is the model's own, and no adapter beside it."""
    return not any(part.startswith("lora_") for part in name.split("."))


def bare(name: str, module: nn.Module | None) -> tuple[str, nn.Module | None]:
    """A layer without the adapter that may be around it, and its name."""
    layer = getattr(module, "base_layer", None)
    if not isinstance(layer, nn.Module):
        return name, module
    return bare(f"{name}.base_layer", layer)


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter or a buffer by its name: positions may be either."""
    place, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(place), last)
    assert isinstance(found, Tensor)
    return found


def layer_of(model: nn.Module, weight: str) -> nn.Module:
    """The layer that works with a weight, which may be uploaded under another name than its."""
    tensor = model.get_parameter(weight)
    owner = model.get_submodule(weight.rpartition(".")[0])
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    return next((layer for layer in layers if layer.weight is tensor), owner)


def _moved(parts: VitParts, rename: Callable[[str], str]) -> VitParts:
    def there(name: str | None) -> str | None:
        return name and rename(name)

    attention = parts.attention
    return replace(
        parts,
        patch_weight=rename(parts.patch_weight),
        patch_bias=there(parts.patch_bias),
        position=there(parts.position),
        cls_token=there(parts.cls_token),
        blocks=tuple(rename(block) for block in parts.blocks),
        head_weight=there(parts.head_weight),
        head_bias=there(parts.head_bias),
        attention=attention
        and FirstAttention(
            there(attention.norm),
            tuple(rename(weight) for weight in attention.weights),
            tuple(map(there, attention.biases)),
        ),
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


def _first_attention(model: nn.Module, blocks: tuple[str, ...]) -> FirstAttention | None:
    modules = dict(model.named_modules())
    norm, qkv = (f"{blocks[0]}.{name}" if blocks else "" for name in ("norm1", "attn.qkv"))
    qkv, layer = bare(qkv, modules.get(qkv))
    if not isinstance(layer, nn.Linear):
        return None
    before = norm if isinstance(modules.get(norm), nn.LayerNorm) else None
    return FirstAttention(
        before, (f"{qkv}.weight",), (f"{qkv}.bias" if layer.bias is not None else None,)
    )


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The repeated blocks of a transformer that anybody wrote, in order: the children of a list,
    all of one kind, each with a norm and layers of its own."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if inside or not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        children = dict(module.named_children())
        kinds = {type(child) for child in children.values()}
        if len(kinds) == 1 and all(_is_block(child) for child in children.values()):
            blocks += [f"{name}.{child}" if name else child for child in children]
    return tuple(blocks)


def _is_block(module: nn.Module) -> bool:
    kinds = [type(inner) for inner in module.modules()]
    normed = any(issubclass(kind, nn.LayerNorm | nn.RMSNorm) for kind in kinds)
    layers = sum(issubclass(kind, nn.Linear | nn.MultiheadAttention) for kind in kinds)
    return normed and layers > 1


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


def feature_statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of features (B, C, ...): the unbiased one, as BatchNorm's
    running statistics have it, and 0 where a channel is a single number."""
    values = features.transpose(0, 1).flatten(1)  # (C, all positions)
    return values.mean(1), values.var(1, correction=min(1, values.shape[1] - 1))


def head_names(model: nn.Module) -> list[str]:
    """Parameter names of the classifier: weight, then bias where it has one."""
    weight, bias = _head(model)
    return [weight] if bias is None else [weight, bias]


def _head(model: nn.Module) -> tuple[str, str | None]:
    if (found := found_in(model)) is not None:
        if found.head is None:
            raise ModelError(
                f"no one linear layer of a {type(model).__name__} gives its logits: it has no head."
            )
        return found.head
    getter = getattr(model, "get_classifier", None)
    head = bare("", getter() if getter is not None else None)[1]
    if not isinstance(head, nn.Linear):
        linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and own(n)]
        if not linears:
            raise ModelError(f"{type(model).__name__} has no linear head.")
        head = linears[-1]
    name = next(n for n, m in model.named_modules() if m is head)
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", f"{prefix}bias" if head.bias is not None else None
