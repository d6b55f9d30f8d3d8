"""Dissection: the parts of a model that somebody else wrote, found by watching a picture pass.

Names say little in a network of one's own, so nothing here goes by them: one picture goes through a
copy, and what each layer read and gave tells what it is. The patch projection is the layer that
reads the picture itself, patch by patch; the positions are what is added to what it gave; the first
attention is whoever reads the first norm of that; the head is the layer whose output is the
model's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.anatomy import FirstAttention, Found, VitParts, bare, blocks_of, own
from fedsim.core.errors import ModelError

_MOST_PREFIX = 16  # tokens that belong to no patch: class, distillation, registers
_CLOSE = 1e-5


@dataclass(frozen=True)
class _Call:
    """One layer at work: what it read and what it gave."""

    name: str
    module: nn.Module
    read: Tensor
    gave: Tensor


@dataclass(frozen=True)
class _Projection:
    """The layer that reads patches: its tokens (N, D), their grid, and how a patch is read."""

    call: _Call
    tokens: Tensor
    grid: tuple[int, int]
    patch: tuple[int, int]
    layout: tuple[int, ...] | None = None


def dissect(model: nn.Module, side: int) -> Found:
    """What one picture of this ``side`` shows of a model; the model is left as it was."""
    twin = _distinct(model)
    picture = _picture(side)
    with _watched(twin) as calls:
        logits = _logits(twin, picture, "")
    head, classes, vit, why = _head(calls, logits), int(logits.shape[1]), None, ""
    try:
        vit = _vit(twin, calls, picture, head)
    except ModelError as error:
        why = str(error)
    return Found(head, classes, vit, why, _tosses(twin, picture))


def _vit(
    model: nn.Module, calls: Sequence[_Call], picture: Tensor, head: tuple[str, str | None] | None
) -> VitParts:
    name = type(model).__name__
    projection = _projection(calls, picture)
    if projection is None:
        raise ModelError(f"a {name} has no layer that reads patches of a picture: it is no ViT.")
    later = calls[calls.index(projection.call) + 1 :]
    sequence = _sequence(later, projection, attends=_attends(model))
    if sequence is None:
        raise ModelError(f"nothing in a {name} reads its patches as a sequence: it is no ViT.")
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    position, prefix = _position(state, sequence, projection)
    module, place = projection.call.module, projection.call.name
    return VitParts(
        patch_weight=f"{place}.weight",
        patch_bias=f"{place}.bias" if module.bias is not None else None,
        position=position,
        cls_token=_class_token(model, projection.tokens.shape[1]),
        blocks=blocks_of(model),
        head_weight=head[0] if head else None,
        head_bias=head[1] if head else None,
        grid=projection.grid,
        patch_size=projection.patch,
        prefix_tokens=prefix,
        attention=_attention(later, sequence),
        layout=projection.layout,
    )


def _tosses(twin: nn.Module, picture: Tensor) -> bool:
    """Whether one picture, twice in a batch, comes out as two while the model is trained."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        one, other = _logits(twin.train(), picture.repeat(2, 1, 1, 1), " in training")
    return not _alike(one, other)


def _logits(model: nn.Module, pictures: Tensor, when: str) -> Tensor:
    logits = model(pictures)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        what = f"a {type(logits).__name__}"
        if isinstance(logits, Tensor):
            what = f"numbers of shape {tuple(logits.shape)}"
        raise ModelError(
            f"a {type(model).__name__} gives{when} {what}, and no logits (pictures, classes)."
        )
    return logits


# -- one picture on its way -----------------------------------------------------------------


def _distinct(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose parameters are told apart by their values: those that begin as
    zeros or ones as well."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(f"a {type(model).__name__} without numbers cannot be looked into.")
    try:
        twin = copy.deepcopy(model).eval()
    except Exception as error:  # somebody's own tensors or handles
        raise ModelError(f"a {type(model).__name__} cannot be copied: {error}") from error
    coin = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point() and bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=coin, dtype=torch.float32)
                parameter.add_(0.01 * noise.to(parameter))
    return twin


def _picture(side: int) -> Tensor:
    """A picture (1, 3, side, side) no two numbers of which are equal."""
    count = 3 * side * side
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return (2 * order.float() / count - 1).view(1, 3, side, side)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Call]]:
    """Every call of a layer with weights of its own, in the order of their ends. A layer with an
    adapter around it gives what the two give together."""
    calls: list[_Call] = []
    layers = {}
    for name, module in model.named_modules():
        place, layer = bare(name, module)
        if own(place) and place not in layers:
            layers[place] = (module, layer)
    watched = nn.Conv2d | nn.Linear | nn.LayerNorm | nn.MultiheadAttention

    def note(name: str, layer: nn.Module, given: Any, named: Mapping[str, Any], gave: Any) -> None:
        read = next((t for t in (*given, *named.values()) if isinstance(t, Tensor)), None)
        gave = gave[0] if isinstance(gave, tuple) else gave
        if read is not None and isinstance(gave, Tensor):
            calls.append(_Call(name, layer, read.detach(), gave.detach()))

    hooks = [
        module.register_forward_hook(
            lambda _, given, named, gave, name=name, layer=layer: note(
                name, layer, given, named, gave
            ),
            with_kwargs=True,
        )
        for name, (module, layer) in layers.items()
        if isinstance(layer, watched)
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


# -- what was seen --------------------------------------------------------------------------


def _head(calls: Sequence[_Call], logits: Tensor) -> tuple[str, str | None] | None:
    """The last linear layer that gave the logits, or what a softmax makes the same of: some
    networks end in its logarithm."""
    for call in reversed(calls):
        given = call.gave.reshape(-1, call.gave.shape[-1])
        if not isinstance(call.module, nn.Linear) or given.shape != logits.shape:
            continue
        if _alike(given, logits) or _alike(given.log_softmax(1), logits):
            bias = f"{call.name}.bias" if call.module.bias is not None else None
            return f"{call.name}.weight", bias
    return None


def _projection(calls: Sequence[_Call], picture: Tensor) -> _Projection | None:
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


def _by_convolution(call: _Call, picture: Tensor) -> _Projection | None:
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
    return _Projection(call, tokens, (int(rows), int(columns)), (int(p), int(q)))


def _by_linear(call: _Call, picture: Tensor) -> _Projection | None:
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
    return _Projection(call, tokens, (across, across), (p, p), tuple(within[0].tolist()))


def _attends(model: nn.Module) -> bool:
    """Whether a network that keeps its tokens in a grid is a transformer: they call it that."""
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _sequence(calls: Sequence[_Call], projection: _Projection, *, attends: bool) -> Tensor | None:
    """The tokens (T, D) as the first layer behind the projection reads them: in a row, or where a
    network ``attends`` in a grid."""
    count, width = projection.tokens.shape
    for call in calls:
        if call.read.shape[-1] == width and call.read.ndim <= (4 if attends else 3):
            tokens = call.read.reshape(-1, width)
            if count <= len(tokens) <= count + _MOST_PREFIX:
                return tokens
    return None


def _position(
    state: Mapping[str, Tensor], sequence: Tensor, projection: _Projection
) -> tuple[str | None, int]:
    """What was added to the patches' tokens, and how many of its rows belong to none."""
    count, width = projection.tokens.shape
    for start in range(len(sequence) - count + 1):
        added = sequence[start : start + count] - projection.tokens
        for name, tensor in state.items():
            if tensor.ndim < 2 or tensor.shape[-1] != width or not tensor.is_floating_point():
                continue
            rows = tensor.reshape(-1, width)
            if count <= len(rows) <= len(sequence) and _alike(rows[-count:], added):
                return name, len(rows) - count
    return None, 0


def _attention(calls: Sequence[_Call], sequence: Tensor) -> FirstAttention | None:
    """The layers that read every token first, behind a norm where there is one."""
    norm, tokens = None, sequence
    for call in calls:
        if isinstance(call.module, nn.LayerNorm) and _same_tokens(call.read, sequence):
            if call.module.weight is None or call.module.bias is None:
                return None
            norm, tokens = call.name, call.gave.reshape(sequence.shape)
            break
    weights: list[str] = []
    biases: list[str | None] = []
    for call in calls:
        if not _same_tokens(call.read, tokens):
            continue
        match call.module:
            case nn.Linear():
                weights.append(f"{call.name}.weight")
                biases.append(f"{call.name}.bias" if call.module.bias is not None else None)
            case nn.MultiheadAttention() if call.module.in_proj_weight is not None:
                weights.append(f"{call.name}.in_proj_weight")
                named = call.module.in_proj_bias is not None
                biases.append(f"{call.name}.in_proj_bias" if named else None)
    return FirstAttention(norm, tuple(weights), tuple(biases)) if weights else None


def _class_token(model: nn.Module, width: int) -> str | None:
    """The token of a model's own that stands before the patches."""
    tokens = [n for n, p in model.named_parameters() if p.ndim > 1 and p.shape[:-1].numel() == 1
              and p.shape[-1] == width]  # fmt: skip
    named = [name for name in tokens if "cls" in name.lower() or "class" in name.lower()]
    return next(iter(named or tokens), None)


def _same_tokens(read: Tensor, tokens: Tensor) -> bool:
    return read.numel() == tokens.numel() and _alike(read.reshape(-1), tokens.reshape(-1))


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _CLOSE * (1 + other.abs().max()))
