"""References: pictures of which an attacker knows that they are in nobody's batch.

What the gradients of any pictures have in common says nothing of who was in a batch, and is learned
from them: from the attacker's own (threat D), else from natural pictures that are nobody's, bent in
many ways, because there are few of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.knowledge import View
from fedsim.core.natural import natural_pictures

_LEAST_CROP = 0.35  # of a picture's side
_TINT = 0.35  # how far colours are mixed and shifted


def reference_pictures(view: View, count: int) -> tuple[Tensor, str]:
    """So many pictures (R, 3, S, S) in [0, 1], and what they are in words."""
    coin = view.coin("references")
    if view.grants("surrogate"):
        found = view.surrogate
        rows = torch.randperm(len(found), generator=coin)[:count]
        more = bent(found, max(0, count - len(rows)), coin)
        return torch.cat([found[rows], more]), "the attacker's own pictures"
    return bent(natural_pictures(view.image_size), count, coin), "natural pictures, bent"


def bent(pictures: Tensor, count: int, coin: torch.Generator) -> Tensor:
    """Random crops of pictures, turned, and in other colours and contrasts: (count, 3, S, S)."""
    side, made = pictures.shape[-1], []
    for _ in range(count):
        picture = pictures[_whole(len(pictures), coin)]
        width = max(2, round(side * _between(_LEAST_CROP, 1, coin)))
        left, top = (_whole(side - width + 1, coin) for _ in range(2))
        crop = picture[None, :, top : top + width, left : left + width]
        crop = F.interpolate(crop, (side, side), mode="bilinear", antialias=True)[0]
        crop = torch.rot90(crop, _whole(4, coin), (1, 2))
        made.append(_tinted(crop.flip(2) if _whole(2, coin) else crop, coin))
    return torch.stack(made) if made else pictures[:0]


def _tinted(picture: Tensor, coin: torch.Generator) -> Tensor:
    """The channels mixed, stretched and shifted."""
    mixing = torch.eye(3) + _TINT * torch.randn(3, 3, generator=coin)
    shift = _TINT * torch.randn(3, 1, 1, generator=coin) / 2
    contrast = _between(0.5, 1.5, coin)
    centred = (picture - 0.5) * contrast
    return (torch.einsum("ij,jhw->ihw", mixing, centred) + 0.5 + shift).clamp(0, 1)


def _whole(below: int, coin: torch.Generator) -> int:
    return int(torch.randint(below, (1,), generator=coin))


def _between(low: float, high: float, coin: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=coin))
