"""OASIS (Jeter et al. 2024): every picture is joined by transformed copies of itself.

Made against active servers, whose bins and gates show a picture where it is alone in them: turned
by right angles a picture keeps its mean brightness, so that its copies fall into the bin that it
falls into, and what the server reads is their blend. The batch grows by as many copies; the
gradient is the mean over all. Transformations are fixed and public: nothing is drawn.

They are also no secret from a server that searches. It shows its own copy of the network the same
copies of the picture it looks for, and matches the blend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.defense import Defense, Informed

Transform = Literal[
    "major_rotation", "minor_rotation", "shear", "horizontal_flip", "vertical_flip"
]  # fmt: skip
MINOR = (30.0, 45.0, 60.0)  # degrees
SHEARS = (0.2, 0.4, 0.6)  # pixels to the side, for each one down


@dataclass(frozen=True)
class Oasis(Defense):
    """``transforms``: major rotations are by 90, 180 and 270 degrees, three copies; minor ones by
    30, 45 and 60; shears by .2, .4 and .6 of the height; flips are one copy each. What comes from
    beyond the edge repeats it. ``originals`` False leaves the pictures themselves out."""

    transforms: Annotated[list[Transform], Field(min_length=1)] = field(
        default_factory=lambda: ["major_rotation"]
    )
    originals: bool = True

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        shown = joined(images, self.transforms, originals=self.originals)
        copies = len(shown) // len(images)
        return shown, labels.repeat(copies, *[1] * (labels.dim() - 1))

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Show the network the same copies."""
        if not any(isinstance(hook, Joined) for hook in model._forward_pre_hooks.values()):
            model.register_forward_pre_hook(Joined(tuple(self.transforms), self.originals))
        words = "oasis: the same copies of every picture are simulated"
        return replace(seen, notes=(*seen.notes, words))


@dataclass
class Joined:
    """What a server puts before its copy of the network. Copies mix numbers of one channel, with
    weights that sum to one: of normalised pictures they are the normalised copies."""

    transforms: tuple[Transform, ...]
    originals: bool

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (joined(given[0], self.transforms, originals=self.originals), *given[1:])


def joined(
    images: Tensor, transforms: list[Transform] | tuple[Transform, ...], *, originals: bool = True
) -> Tensor:
    """Pictures (B, C, H, W), and after them all of their copies of a kind, kind by kind."""
    shown = [images] if originals else []
    for transform in dict.fromkeys(transforms):
        shown += _copies(images, transform)
    return torch.cat(shown)


def _copies(images: Tensor, transform: Transform) -> list[Tensor]:
    match transform:
        case "major_rotation":
            return [images.rot90(turns, (-2, -1)) for turns in (1, 2, 3)]
        case "minor_rotation":
            angles = [math.radians(degrees) for degrees in MINOR]
            return [
                warped(images, ((math.cos(a), -math.sin(a)), (math.sin(a), math.cos(a))))
                for a in angles
            ]
        case "shear":
            return [warped(images, ((1.0, 0.0), (factor, 1.0))) for factor in SHEARS]
        case "horizontal_flip":
            return [images.flip(-1)]
        case "vertical_flip":
            return [images.flip(-2)]


def warped(images: Tensor, matrix: tuple[tuple[float, float], tuple[float, float]]) -> Tensor:
    """Pictures read at ``matrix`` times each place (row, column) around their middle, between
    pixels in proportion. A sum of four gathers: any order of derivatives exists."""
    height, width = images.shape[-2:]
    rows, columns = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) - (height - 1) / 2,
        torch.arange(width, dtype=torch.float64) - (width - 1) / 2,
        indexing="ij",
    )
    (a, b), (c, d) = matrix
    y = (a * rows + b * columns + (height - 1) / 2).clamp(0, height - 1)
    x = (c * rows + d * columns + (width - 1) / 2).clamp(0, width - 1)
    top, left = y.floor().long(), x.floor().long()
    low, right = (top + 1).clamp(max=height - 1), (left + 1).clamp(max=width - 1)
    down, over = y - top, x - left
    flat = images.flatten(-2)
    corners = (
        (top, left, (1 - down) * (1 - over)),
        (top, right, (1 - down) * over),
        (low, left, down * (1 - over)),
        (low, right, down * over),
    )
    parts = [
        flat[..., (at * width + along).flatten().to(images.device)] * share.flatten().to(images)
        for at, along, share in corners
    ]
    return torch.stack(parts).sum(0).view_as(images)
