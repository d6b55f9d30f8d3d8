"""Pictures: what every data set is to the clients, and how a picture becomes a tensor."""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec

Split = Literal["train", "test"]

# What Pillow raises on a file that is cut off, garbled or absurdly large. A plain list, so that a
# mistake of ours is not taken for a damaged picture.
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
# Kinds of pictures that are decoded by Pillow itself: for PostScript it would start a program.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
MOST_PIXELS = 89_478_485  # where Pillow warns of a decompression bomb; a quarter of a gigabyte
MOST_BYTES = 128 << 20  # of a picture's file

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # it is an error here


class ImageSet(ABC):
    """Labelled pictures, each decoded when it is asked for; safe to pickle to other processes."""

    classes: tuple[str, ...]
    labels: np.ndarray  # int64, (n,), known without decoding a picture
    skipped: tuple[str, ...] = ()  # files that could not be decoded, left out
    groups: np.ndarray | None = None  # int64, (n,): whose picture each is, where that is known
    stamp: str | None = None  # what changes when a picture does, of a set too large to read through

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> torch.Tensor:
        """(3, image_size, image_size) float32 in [0, 1]; same index, same tensor, everywhere."""


Loader = Callable[[DataSpec, Split], ImageSet]  # or a class that is made in the same way


def path_of(data: DataSpec, what: str) -> str:
    """``data.path``, for a data set that needs one; ``what`` is expected there."""
    if not data.path:
        raise DataError(f"data.path is needed for {data.name}: give {what}.")
    return data.path


class Remembered(ImageSet):
    """Pictures that are decoded once and then kept, up to ``limit`` bytes; later ones are decoded
    anew each time. Rounds ask for the same pictures again and again, and decoding costs as much as
    a step of a small model."""

    def __init__(self, source: ImageSet, limit: int = 256 << 20) -> None:
        self.source, self.limit = source, limit
        self.classes, self.labels, self.skipped = source.classes, source.labels, source.skipped
        self.groups, self.stamp = source.groups, source.stamp
        self._packed: dict[int, torch.Tensor] = {}
        self._bytes = 0

    def image(self, index: int) -> torch.Tensor:
        if index in self._packed:
            return unpacked(self._packed[index])
        image = self.source.image(index)
        small = packed(image)
        if self._bytes + small.nbytes <= self.limit:
            self._packed[index] = small
            self._bytes += small.nbytes
        return image

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": {}, "_bytes": 0}


class Part(ImageSet):
    """Some samples of a set, in an order of their own."""

    def __init__(self, source: ImageSet, rows: np.ndarray) -> None:
        self.source, self.rows = source, rows
        self.classes, self.labels = source.classes, source.labels[rows]

    def image(self, index: int) -> torch.Tensor:
        return self.source.image(int(self.rows[index]))


def packed(image: torch.Tensor) -> torch.Tensor:
    """A picture in as little room as it takes without loss: 8 bits where it has no more."""
    coarse = (image * 255.0).round().to(torch.uint8)
    return coarse if torch.equal(coarse.float() / 255.0, image) else image.clone()


def unpacked(stored: torch.Tensor) -> torch.Tensor:
    """What `packed` was given."""
    return stored.float() / 255.0 if stored.dtype == torch.uint8 else stored.clone()


def opened(file: BinaryIO) -> Image.Image:
    """A picture of which only the header was read; raises one of ``DAMAGED`` where it is none, or
    too large to be held."""
    picture = Image.open(file, formats=_known_formats())
    if picture.width * picture.height > MOST_PIXELS:
        raise Image.DecompressionBombError(f"{picture.width} x {picture.height} pixels")
    return picture


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """Those of ``FORMATS`` that this Pillow was built with."""
    Image.init()
    return tuple(kind for kind in FORMATS if kind in Image.OPEN)


def decode(content: bytes) -> Image.Image:
    """The whole picture in RGB; raises one of ``DAMAGED`` where the file is not whole."""
    with opened(io.BytesIO(content)) as picture:
        picture.load()
        if picture.mode.startswith("I;16"):
            # Pillow would clip 16 bits to white instead of scaling them.
            grey = (np.asarray(picture, dtype=np.uint16) >> 8).astype(np.uint8)
            return Image.fromarray(grey).convert("RGB")
        if "transparency" in picture.info:
            return picture.convert("RGBA").convert("RGB")
        return picture.convert("RGB")


def to_tensor(picture: Image.Image, size: int) -> torch.Tensor:
    """The centre square, resized with antialiasing: (3, size, size) float32 in [0, 1]."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    # Cropped first, not by resize's own box, whose filter also reads pixels around the box.
    square = picture.convert("RGB").crop((left, top, left + side, top + side))
    pixels = np.asarray(square.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float32)
    return torch.from_numpy(pixels / 255.0).permute(2, 0, 1).contiguous()
