"""CIFAR-10 as it lies on people's disks: the official python batches, or a tree of pictures."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from clients.folders import load_tree
from clients.pictures import ImageSet, to_tensor
from fedsim.core.errors import DataError

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
FOLDER = "cifar-10-batches-py"


class CifarBatches(ImageSet):
    """One split of the official batches; the pixels are read again in each process, not sent."""

    def __init__(self, folder: Path, split: Literal["train", "test"], image_size: int) -> None:
        self._files = [folder / name for name in BATCHES[split]]
        self._image_size = image_size
        batches = [_read_batch(file) for file in self._files]
        self._pixels: np.ndarray | None = np.concatenate([pixels for pixels, _ in batches])
        self.labels = np.concatenate([labels for _, labels in batches])
        self.classes = _class_names(folder / "batches.meta")
        if self.labels.size and not 0 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise DataError(f"{folder} has labels without a class name; get CIFAR-10 anew.")

    def image(self, index: int) -> torch.Tensor:
        if self._pixels is None:
            self._pixels = np.concatenate([_read_batch(file)[0] for file in self._files])
        picture = self._pixels[index].reshape(3, 32, 32).transpose(1, 2, 0)
        return to_tensor(Image.fromarray(np.ascontiguousarray(picture)), self._image_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}


def load_cifar10(path: str, split: Literal["train", "test"], image_size: int) -> ImageSet:
    """``path``: the official batches or their parent, or a tree or zips of pictures."""
    root = Path(path).expanduser().resolve()
    for folder in (root, root / FOLDER):
        if any((folder / name).is_file() for names in BATCHES.values() for name in names):
            return CifarBatches(folder, split, image_size)
    return load_tree(path, split, image_size, class_order=CLASSES)


def _read_batch(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 3072) uint8, channel by channel, and labels (n,)."""
    content = _unpickle(file)
    pixels, labels = getattr(content.get("data"), "pixels", None), content.get("labels")
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.ndim != 2
        or pixels.shape[1] != 3 * 32 * 32
        or not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) for label in labels)
    ):
        raise DataError(f"{file} is not a CIFAR-10 batch; get CIFAR-10's python version anew.")
    return pixels, np.array(labels, dtype=np.int64)


def _class_names(meta: Path) -> tuple[str, ...]:
    if not meta.is_file():
        return CLASSES
    names = _unpickle(meta).get("label_names")
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise DataError(f"{meta} does not name the classes; get CIFAR-10's python version anew.")
    return tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names)


def _unpickle(file: Path) -> dict[str, Any]:
    """A batch's dictionary with text keys, read without running anything the file may ask for."""
    try:
        content = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="bytes").load()
    except FileNotFoundError:
        raise DataError(f"{file} is missing; get CIFAR-10's python version anew.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except _Refused as error:
        raise DataError(
            f"{file} asks to load '{error}', which no CIFAR-10 batch needs; do not trust this file."
        ) from error
    # Garbled bytes make the unpickler raise almost anything, as its documentation says.
    except Exception as error:
        raise DataError(f"{file} is damaged; get CIFAR-10's python version anew.") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a CIFAR-10 batch; get CIFAR-10's python version anew.")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in content.items()}


class _Refused(pickle.UnpicklingError):
    pass


class _ArraysOnly(pickle.Unpickler):
    """Containers, text, numbers and arrays of bytes; every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[module, name]


class _Array:
    """Takes what numpy pickles of an array, and keeps it only if it is one of bytes.

    numpy's own ``__setstate__`` believes a dtype's flags, which a hostile file may forge.
    """

    def __init__(self, *_: object) -> None:
        self.pixels: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if isinstance(dtype, _Dtype) and dtype.code in ("u1", b"u1"):
            flat = np.frombuffer(content, dtype=np.uint8)
            self.pixels = np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"))


class _Dtype:
    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and flags: nothing that bytes need."""


def _latin1(text: str, _codec: object) -> bytes:
    """For ``_codecs.encode``, by which Python 3 writes bytes into an old pickle."""
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}
