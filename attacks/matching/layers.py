"""Layers: which ones of an update an attack looks at, by block and by component."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from torch import nn

from fedsim.core.anatomy import NORMS, VitParts, found_in, head_names, vit_parts
from fedsim.core.errors import AttackError, ModelError

Part = Literal["embeddings", "attention", "mlp", "norm", "head", "other"]
Blocks = tuple[int, int]  # first and last block, counted from 1, both included


def part_of(model: nn.Module) -> dict[str, tuple[Part, int | None]]:
    """What each parameter belongs to: its component, and the number of its block from 1."""
    head = set(_head(model))
    try:
        parts = vit_parts(model)
    except ModelError:
        stages = _stages(model)
        return {
            name: ("head" if name in head else "other", _stage_of(name, stages))
            for name, _ in model.named_parameters()
        }
    blocks = {f"{block}.": number for number, block in enumerate(parts.blocks, start=1)}
    embeddings = {parts.patch_weight, parts.patch_bias, parts.position, parts.cls_token}
    kind = _by_name if found_in(model) is None else _by_build(model, parts)
    places: dict[str, tuple[Part, int | None]] = {}
    for name, _ in model.named_parameters():
        block = next((n for prefix, n in blocks.items() if name.startswith(prefix)), None)
        part: Part = kind(name, block is not None)
        if name in head:
            part = "head"
        elif name in embeddings:
            part = "embeddings"
        places[name] = (part, block)
    return places


def _head(model: nn.Module) -> list[str]:
    try:
        return head_names(model)
    except ModelError:  # none of its layers is the head, and the others can be matched
        return []


def _by_name(name: str, inside: bool) -> Part:
    """The component of a parameter of timm's, ``inside`` a block or not."""
    words = name.split(".")
    if inside and "attn" in words:
        return "attention"
    if inside and "mlp" in words:
        return "mlp"
    normed = any(word.startswith("norm") or word == "fc_norm" for word in words)
    return "norm" if normed else "other"


def _by_build(model: nn.Module, parts: VitParts) -> Callable[[str, bool], Part]:
    """The same of anybody's: norms by their type, attention by the type of a module around it or
    by where in a block its first layers lie, and what is left of a block is its MLP."""
    modules = dict(model.named_modules())
    first = f"{parts.blocks[0]}." if parts.blocks else ""
    read = parts.attention.weights + parts.attention.biases if parts.attention else ()
    inner = {name.removeprefix(first) for name in read if name}

    def component(name: str, inside: bool) -> Part:
        owner = name.rpartition(".")[0]
        if isinstance(modules[owner], NORMS) or "Norm" in type(modules[owner]).__name__:
            return "norm"
        if not inside:
            return "other"
        block = next(block for block in parts.blocks if name.startswith(f"{block}."))
        around = [modules[owner[:end]] for end in _ends(owner, len(block))]
        attends = any("attention" in type(module).__name__.lower() for module in around)
        return "attention" if attends or name.removeprefix(f"{block}.") in inner else "mlp"

    return component


def _ends(path: str, start: int) -> list[int]:
    """Where the modules inside a block end in a dotted path, the block of ``start`` letters left
    out."""
    return [at for at in range(start + 1, len(path) + 1) if at == len(path) or path[at] == "."]


def select(
    model: nn.Module,
    names: Iterable[str],
    *,
    parts: Iterable[Part] | None = None,
    blocks: Blocks | None = None,
    without: Iterable[Part] = (),
    without_blocks: Blocks | None = None,
) -> list[str]:
    """The layers of ``names`` to match: of these components, and of these blocks.

    ``blocks`` keeps what lies in these blocks; embeddings and head lie in none and are left out.
    ``without`` and ``without_blocks`` leave components and blocks out and keep all the rest.
    """
    known = part_of(model)
    _refuse_nothing(known.values(), {*(parts or ()), *without}, blocks, without_blocks)
    wanted = set(parts) if parts is not None else None
    unwanted = set(without)
    chosen = []
    for name in names:
        if name not in known:
            raise AttackError(f"the update holds '{name}', which the model does not have.")
        part, block = known[name]
        if wanted is not None and part not in wanted:
            continue
        if part in unwanted:
            continue
        if blocks is not None and (block is None or not blocks[0] <= block <= blocks[1]):
            continue
        if without_blocks and block and without_blocks[0] <= block <= without_blocks[1]:
            continue
        chosen.append(name)
    if not chosen:
        raise AttackError("no layer of the update is left by the selection of parts and blocks.")
    return chosen


def _refuse_nothing(
    places: Iterable[tuple[Part, int | None]],
    parts: set[Part],
    blocks: Blocks | None,
    without_blocks: Blocks | None,
) -> None:
    """Raise for a selection of what the model does not have, which would select nothing."""
    places = list(places)
    if absent := parts - {part for part, _ in places}:
        raise AttackError(f"this model has no layers of the part '{min(absent)}'.")
    last = max((block or 0 for _, block in places), default=0)
    for name, given in (("blocks", blocks), ("without_blocks", without_blocks)):
        if given is not None and not 1 <= given[0] <= given[1] <= last:
            raise AttackError(
                f"{name} are the first and the last one, counted from 1, of {last}; not "
                f"{given[0]} to {given[1]}."
            )


def _stages(model: nn.Module) -> list[str]:
    """The stages of a convolutional network: its children that hold parameters, in order."""
    return [name for name, child in model.named_children() if any(True for _ in child.parameters())]


def _stage_of(name: str, stages: list[str]) -> int | None:
    first = name.split(".")[0]
    return stages.index(first) + 1 if first in stages else None
