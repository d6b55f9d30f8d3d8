"""Dissection: the parts of a model that somebody else wrote, found by watching a picture pass.

Names say little in a network of one's own, so nothing here goes by them: one picture goes through a
copy, and what each layer read and gave tells what it is. The patch projection is the layer that
reads the picture itself, patch by patch; the positions are what is added to what it gave; the first
attention is whoever reads the first norm of that; the head is the layer whose output is the
model's.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core.anatomy import FirstAttention, Found, VitParts, blocks_of
from fedsim.core.errors import ModelError
from fedsim.core.passage import (
    CLOSE,
    Call,
    Projection,
    alike,
    distinct,
    picture_of,
    projection_in,
    watched,
)

_MOST_PREFIX = 16  # tokens that belong to no patch: class, distillation, registers


@dataclass(frozen=True)
class _Seen:
    """Two pictures on their way through the same model: the projection of each, and its calls
    after that."""

    projections: tuple[Projection, Projection]
    later: tuple[Sequence[Call], Sequence[Call]]


@dataclass(frozen=True)
class Added:
    """What a model makes of its patches' tokens before it reads them: they are multiplied by
    ``gain``, and ``positions`` (N, D) are added."""

    gain: float
    positions: Tensor


def dissect(model: nn.Module, side: int) -> Found:
    """What two pictures of this ``side`` show of a model; the model is left as it was."""
    twin = distinct(model)
    picture = picture_of(side)
    with watched(twin, picture) as calls:
        logits = _logits(twin, picture, "")
    head, classes, vit, why = _head(twin, calls, logits), int(logits.shape[1]), None, ""
    try:
        vit = _vit(twin, _seen(twin, side, calls), head)
    except ModelError as error:
        why = str(error)
    return Found(head, classes, vit, why, _tosses(twin, picture))


def added(model: nn.Module, side: int) -> Added | None:
    """What a model adds to its patches with the weights that it has; None where what it does to
    them is more than that."""
    twin = copy.deepcopy(model).cpu().float().eval()
    picture = picture_of(side)
    try:
        with watched(twin, picture) as calls:
            _logits(twin, picture, "")
        return _reading(_seen(twin, side, calls), attends=_attends(twin))[2]
    except ModelError:
        return None


def _seen(model: nn.Module, side: int, calls: Sequence[Call]) -> _Seen:
    """Beside the calls for the first picture, those for another."""
    name, pictures = type(model).__name__, (picture_of(side), picture_of(side, 1))
    first = projection_in(calls, pictures[0])
    if first is None:
        raise ModelError(f"a {name} has no layer that reads patches of a picture: it is no ViT.")
    with watched(model, pictures[1]) as again:
        _logits(model, pictures[1], "")
    second = projection_in(again, pictures[1])
    if second is None or second.call.name != first.call.name:
        raise ModelError(f"a {name} reads the patches of each picture otherwise: it is no ViT.")
    later = (calls[calls.index(first.call) + 1 :], again[again.index(second.call) + 1 :])
    return _Seen((first, second), later)


def _vit(model: nn.Module, seen: _Seen, head: tuple[str, str | None] | None) -> VitParts:
    projection, later = seen.projections[0], seen.later[0]
    sequence, start, summed = _reading(seen, attends=_attends(model))
    if sequence is None:
        raise ModelError(
            f"nothing in a {type(model).__name__} reads its patches as a sequence: it is no ViT."
        )
    place, module = projection.call.name, projection.call.module
    uploaded = _uploaded(model)
    if id(module.weight) not in uploaded:
        raise ModelError(
            f"the weights of '{place}', which reads a {type(model).__name__}'s patches, are made "
            f"of other parameters: what is uploaded is the gradient of those."
        )
    position, prefix, upright = _position(model, summed, projection)
    if position is None:  # in the sequence, of which patches may not be the first
        prefix = start
    return VitParts(
        patch_weight=uploaded[id(module.weight)],
        patch_bias=uploaded.get(id(module.bias)),
        position=position,
        cls_token=_class_token(model, projection.tokens.shape[1]),
        blocks=blocks_of(model),
        head_weight=head[0] if head else None,
        head_bias=head[1] if head else None,
        grid=projection.grid,
        patch_size=projection.patch,
        prefix_tokens=prefix,
        attention=_attention(model, later, sequence),
        layout=projection.layout,
        length=len(sequence),
        upright=upright,
        measurable=position is None and summed is not None and bool(summed.positions.any()),
        gained=summed is not None and summed.gain != 1.0,
    )


def _tosses(twin: nn.Module, picture: Tensor) -> bool:
    """Whether the model draws while it is trained, from a coin of torch's, numpy's or Python's own;
    or one picture, twice in a batch and once more, comes out as two."""
    ours = random.getstate(), np.random.get_state()
    pair = picture.repeat(2, 1, 1, 1)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            before = _coins()
            one, other = first = _logits(twin.train(), pair, " in training")
            drawn = before != _coins()
            again = _logits(twin, pair, " in training")
    finally:
        random.setstate(ours[0])
        np.random.set_state(ours[1])
    return drawn or not alike(one, other) or not alike(first, again)


def _coins() -> tuple[object, ...]:
    """Where the coins that anybody may toss stand."""
    numpys = repr(np.random.get_state(legacy=False))
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpys


def _logits(model: nn.Module, pictures: Tensor, when: str) -> Tensor:
    logits = model(pictures)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        what = f"a {type(logits).__name__}"
        if isinstance(logits, Tensor):
            what = f"numbers of shape {tuple(logits.shape)}"
        raise ModelError(
            f"a {type(model).__name__} gives{when} {what}, and no logits (pictures, classes); name "
            f"one whose forward gives them alone, a subclass for example."
        )
    return logits


# -- what was seen --------------------------------------------------------------------------


def _uploaded(model: nn.Module) -> dict[int, str]:
    """The name under which each parameter is uploaded, by its id: of several the first. A weight
    that is computed from others has none."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _head(model: nn.Module, calls: Sequence[Call], logits: Tensor) -> tuple[str, str | None] | None:
    """The last linear layer that gave the logits, or what a softmax makes the same of: some
    networks end in its logarithm."""
    uploaded = _uploaded(model)
    for call in reversed(calls):
        given = call.gave.reshape(-1, call.gave.shape[-1]) if call.gave.ndim else call.gave
        if not isinstance(call.module, nn.Linear) or given.shape != logits.shape:
            continue
        if alike(given, logits) or alike(given.log_softmax(1), logits):
            weight = uploaded.get(id(call.module.weight))
            return (weight, uploaded.get(id(call.module.bias))) if weight is not None else None
    return None


def _attends(model: nn.Module) -> bool:
    """Whether a network that keeps its tokens in a grid is a transformer: they call it that."""
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _reading(seen: _Seen, *, attends: bool) -> tuple[Tensor | None, int, Added | None]:
    """The tokens (T, D) as the first layer behind the projection reads them, in a row, or where a
    network ``attends`` in a grid; where among them the patches begin; and what was added to those.
    A layer that reads patches with something added comes before one that reads them bare."""
    found: tuple[Tensor | None, int, Added | None] = (None, 0, None)
    count, width = seen.projections[0].tokens.shape
    for one, other in zip(*seen.later, strict=False):
        if one.name != other.name or one.read.shape != other.read.shape:
            break
        if (
            one.read.ndim < 2
            or one.read.ndim > (4 if attends else 3)
            or one.read.shape[-1] != width
        ):
            continue
        pair = one.read.reshape(-1, width), other.read.reshape(-1, width)
        if not count <= len(pair[0]) <= count + _MOST_PREFIX:
            continue
        for start in range(len(pair[0]) - count + 1):
            rows = [tokens[start : start + count] for tokens in pair]
            summed = _summed(rows, [projection.tokens for projection in seen.projections])
            if summed is not None:
                if bool(summed.positions.any()):
                    return pair[0], start, summed
                if found[2] is None:
                    found = (pair[0], start, summed)
        if found[0] is None:
            found = (pair[0], 0, None)
    return found


def _summed(rows: Sequence[Tensor], tokens: Sequence[Tensor]) -> Added | None:
    """What was done to tokens, where it is the same for two pictures: a product and a sum."""
    apart, before = (t[0].double() - t[1].double() for t in (rows, tokens))
    gain = float((apart * before).sum() / before.square().sum().clamp(min=1e-300))
    gain = 1.0 if abs(gain - 1) < CLOSE else gain
    if gain == 0.0 or not alike(gain * before, apart):
        return None
    positions = rows[0].double() - gain * tokens[0].double()
    nothing = bool(positions.abs().max() <= CLOSE * (1 + rows[0].abs().max()))
    return Added(gain, torch.zeros_like(positions) if nothing else positions)


def _position(
    model: nn.Module, summed: Added | None, projection: Projection
) -> tuple[str | None, int, bool]:
    """The tensor whose rows were added to the patches' tokens, how many of its rows come before
    those, and whether it lies as a picture does."""
    if summed is None or not bool(summed.positions.any()):
        return None, 0, False
    count, width = projection.tokens.shape
    rows_of_all = summed.positions.float()
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            continue
        if tensor.shape[-1] == width:
            table = tensor.reshape(-1, width).float()
            for first in range(len(table) - count + 1):
                if alike(table[first], rows_of_all[0]) and alike(
                    table[first : first + count], rows_of_all
                ):
                    return name, first, False
        fits = tensor.shape[-2:] == projection.grid and tensor.numel() == count * width
        if fits and alike(tensor.reshape(width, count).T.float(), rows_of_all):
            return name, 0, True
    return None, 0, False


def _attention(model: nn.Module, calls: Sequence[Call], sequence: Tensor) -> FirstAttention | None:
    """The layers that read every token first, behind a norm where there is one."""
    norm, tokens, uploaded = None, sequence, _uploaded(model)
    for call in calls:
        if isinstance(call.module, nn.LayerNorm) and _same_tokens(call.read, sequence):
            wide = call.module.normalized_shape != (sequence.shape[1],)
            if wide or call.module.weight is None or call.module.bias is None:
                return None
            norm, tokens = call.name, call.gave.reshape(sequence.shape)
            break
    weights: list[str | None] = []
    biases: list[str | None] = []
    for call in calls:
        if not _same_tokens(call.read, tokens):
            continue
        match call.module:
            case nn.Linear():
                weights.append(uploaded.get(id(call.module.weight)))
                biases.append(uploaded.get(id(call.module.bias)))
            case nn.MultiheadAttention() if call.module.in_proj_weight is not None:
                weights.append(uploaded.get(id(call.module.in_proj_weight)))
                biases.append(uploaded.get(id(call.module.in_proj_bias)))
    known = tuple(weight for weight in weights if weight is not None)
    if not known or len(known) < len(weights):
        return None
    return FirstAttention(norm, known, tuple(biases))


def _class_token(model: nn.Module, width: int) -> str | None:
    """The token of a model's own that stands before the patches."""
    tokens = [n for n, p in model.named_parameters() if p.ndim > 1 and p.shape[:-1].numel() == 1
              and p.shape[-1] == width]  # fmt: skip
    named = [name for name in tokens if "cls" in name.lower() or "class" in name.lower()]
    return next(iter(named or tokens), None)


def _same_tokens(read: Tensor, tokens: Tensor) -> bool:
    return read.numel() == tokens.numel() and alike(read.reshape(-1), tokens.reshape(-1))
