"""Photos: the data sets that need no download, from pictures inside scikit-image's wheel."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import skimage
import torch
from PIL import Image

from fedsim.clients.data.pictures import ImageSet, Split, decode, to_tensor
from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec

Box = tuple[int, int, int, int]  # left, top, right, bottom; right and bottom are outside

PICTURES = {
    "astronaut": "astronaut.png",
    "chelsea": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "retina": "retina.jpg",
    "immunohistochemistry": "ihc.png",
    "hubble_deep_field": "hubble_deep_field.jpg",
    "motorcycle": "motorcycle_left.png",
}
_CROPS = {"train": 64, "test": 16}  # of each picture
_TEST_WIDTH = 0.3  # on the left, where every photograph still shows some of its subject
_CROP_SEED = "fedsim photos 1"  # the data set itself: another seed is another data set


class Photos(ImageSet):
    """Square crops of eight colour photographs, labelled by photograph.

    Test crops lie in the left 30 % of a photograph and train crops in the right 70 %: the two share
    no pixel, so a test crop was never seen in training, not even in part.
    """

    def __init__(self, data: DataSpec, split: Split) -> None:
        self.classes = tuple(PICTURES)
        self.labels = np.repeat(np.arange(len(PICTURES), dtype=np.int64), _CROPS[split])
        self._boxes = [box for name in PICTURES for box in crop_boxes(name, split)]
        self._image_size = data.image_size

    def image(self, index: int) -> torch.Tensor:
        photograph = _photograph(self.classes[self.labels[index]])
        return to_tensor(photograph.crop(self._boxes[index]), self._image_size)


class LfwSubset(ImageSet):
    """100 faces and 100 patches of background, grey, 25 x 25; every fifth of each is for test."""

    def __init__(self, data: DataSpec, split: Split) -> None:
        pixels = np.load(_file("lfw_subset.npy"), allow_pickle=False)
        labels = np.repeat(np.array([0, 1], dtype=np.int64), 100)
        held_out = np.arange(len(labels)) % 5 == 4
        chosen = held_out if split == "test" else ~held_out
        self.classes = ("face", "not_face")
        self.labels = labels[chosen]
        self._pixels = np.rint(pixels[chosen] * 255).astype(np.uint8)
        self._image_size = data.image_size

    def image(self, index: int) -> torch.Tensor:
        return to_tensor(Image.fromarray(self._pixels[index]), self._image_size)


def crop_boxes(picture: str, split: Split) -> list[Box]:
    """Where the crops of one photograph lie, in its own pixels."""
    left, top, right, bottom = _region(picture, split)
    short = min(right - left, bottom - top)
    # Only random() is promised to give the same numbers in every version of Python.
    draw = random.Random(f"{_CROP_SEED} {picture} {split}").random
    boxes = []
    for _ in range(_CROPS[split]):
        side = round(short * (0.5 + 0.5 * draw()))
        x = left + int(draw() * (right - left - side + 1))
        y = top + int(draw() * (bottom - top - side + 1))
        boxes.append((x, y, x + side, y + side))
    return boxes


def _region(picture: str, split: Split) -> Box:
    width, height = _photograph(picture).size
    border = round(width * _TEST_WIDTH)
    return (0, 0, border, height) if split == "test" else (border, 0, width, height)


@functools.cache
def _photograph(picture: str) -> Image.Image:
    return decode(_file(PICTURES[picture]).read_bytes())


def _file(name: str) -> Path:
    """A file of the wheel, by its path: skimage's own loaders may reach for the network."""
    path = Path(skimage.__file__).parent / "data" / name
    if not path.is_file():
        raise DataError(
            f"scikit-image's picture '{name}' is missing from its package; "
            "reinstall scikit-image from its wheel or use data.name=imagefolder."
        )
    return path
