"""Natural pictures that are nobody's: what an attacker without data may set its scales by.

Crops of photographs that come inside scikit-image's and matplotlib's wheels, and that no data set
of ours deals to clients (`photos` has others). Most are grey: they show what edges and textures of
the world look like to a network, not how its colours are distributed.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import matplotlib
import numpy as np
import skimage
import torch
from PIL import Image
from torch import Tensor

_GREY = ("brick", "camera", "coins", "grass", "gravel", "moon")  # in scikit-image
_COLOUR = "grace_hopper.jpg"  # in matplotlib
_CROPS = {"grey": 2, "colour": 12}  # of each


@functools.cache
def natural_pictures(side: int) -> Tensor:
    """Twenty-four pictures, (24, 3, S, S) in [0, 1], in an order that mixes them."""
    crops = []
    for name in _GREY:
        path = Path(skimage.__file__).parent / "data" / f"{name}.png"
        crops += _crops(path, _CROPS["grey"], side)
    colour = Path(matplotlib.get_data_path()) / "sample_data" / _COLOUR
    crops += _crops(colour, _CROPS["colour"], side)
    random.Random("natural order").shuffle(crops)
    return torch.stack(crops)


def _crops(path: Path, count: int, side: int) -> list[Tensor]:
    coin = random.Random(f"natural {path.name}")
    crops = []
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    for _ in range(count):
        width = round(coin.uniform(0.4, 0.9) * min(picture.size))
        left, top = (coin.randint(0, extent - width) for extent in picture.size)
        crop = picture.crop((left, top, left + width, top + width))
        pixels = np.asarray(crop.resize((side, side), Image.Resampling.BILINEAR), dtype=np.float32)
        crops.append(torch.from_numpy(pixels.copy() / 255).permute(2, 0, 1))
    return crops
