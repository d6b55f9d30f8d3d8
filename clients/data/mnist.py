"""MNIST in its own files: idx, packed or not; Fashion-MNIST and others of that form as well."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedsim.clients.data.pictures import ImageSet, Split, path_of, to_tensor
from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec

FOLDERS = ("", "MNIST/raw", "raw")
_STEMS = {"train": "train", "test": "t10k"}
CLASSES = tuple(str(digit) for digit in range(10))
MOST_BYTES = 1 << 30  # of one file, unpacked; MNIST's largest has 45 MB


class _Mnist(ImageSet):
    """One split; grey in three channels. The pixels are read again in each process, not sent."""

    def __init__(self, root: Path, split: Split, image_size: int) -> None:
        self._file = _find(root, f"{_STEMS[split]}-images", "idx3-ubyte")
        labels_file = _find(root, f"{_STEMS[split]}-labels", "idx1-ubyte")
        self._image_size = image_size
        self._pixels: np.ndarray | None = _read_idx(self._file, 3)
        self.classes = CLASSES
        self.labels = _read_idx(labels_file, 1).astype(np.int64)
        if len(self.labels) != len(self._pixels):
            raise DataError(
                f"{self._file} holds {len(self._pixels)} pictures but {labels_file} "
                f"{len(self.labels)} labels; get both anew."
            )
        if not len(self.labels) or not self._pixels.size:
            raise DataError(f"{self._file} holds no pictures; get it anew.")
        if self.labels.max() >= len(CLASSES):
            raise DataError(
                f"{labels_file} has the label {self.labels.max()}, which is no digit; "
                "give MNIST's own files."
            )

    def image(self, index: int) -> torch.Tensor:
        if self._pixels is None:
            self._pixels = _read_idx(self._file, 3)
        return to_tensor(Image.fromarray(self._pixels[index]), self._image_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}


def load_mnist(data: DataSpec, split: Split) -> ImageSet:
    """``data.path``: the folder of the four files, or one that holds them as ``MNIST/raw/``."""
    path = path_of(data, "the folder of its four idx files")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"data.path '{path}' is no folder; give the one with MNIST's idx files.")
    return _Mnist(root.resolve(), split, data.image_size)


def _find(root: Path, stem: str, kind: str) -> Path:
    for folder in FOLDERS:
        for name in (f"{stem}-{kind}", f"{stem}.{kind}"):  # some packers write the dot
            for file in (root / folder / name, root / folder / f"{name}.gz"):
                if file.is_file():
                    return file
    raise DataError(
        f"{root} has no {stem}-{kind} (nor .gz, nor under MNIST/raw/); put MNIST's files there."
    )


def _read_idx(file: Path, dimensions: int) -> np.ndarray:
    """Bytes 0 0 8 d, then d sizes of four bytes each, then the values, uint8."""
    content = _unpacked(file)
    head = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < head:
        raise DataError(f"{file} is no idx file of {dimensions} dimensions; get it anew.")
    shape = tuple(int(size) for size in np.frombuffer(content[4:head], dtype=">u4"))
    wanted = int(np.prod(shape, dtype=object))
    if len(content) - head != wanted:
        raise DataError(
            f"{file} announces {wanted} bytes of content but holds {len(content) - head}; "
            "get it anew."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


def _unpacked(file: Path) -> bytes:
    """All of a file, piece by piece: a few bytes may stand for gigabytes."""
    content = bytearray()
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            while len(content) <= MOST_BYTES and (piece := stream.read(1 << 20)):
                content += piece
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} is damaged ({error}); get it anew.") from error
    if len(content) > MOST_BYTES:
        raise DataError(
            f"{file} holds more than {MOST_BYTES >> 20} MB, which no data set of its kind does; "
            "get it anew."
        )
    return bytes(content)
