"""Pickles of arrays of bytes, read without running anything that a file may ask for."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.errors import DataError


def read_pickle(file: Path, what: str) -> dict[str, Any]:
    """A dictionary with text keys; its arrays of bytes are ``Pixels``. ``what``: for messages."""
    try:
        content = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="bytes").load()
    except FileNotFoundError:
        raise DataError(f"{file} is missing; get {what}'s python version anew.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except _Refused as error:
        raise DataError(
            f"{file} asks to load '{error}', which no {what} batch needs; do not trust this file."
        ) from error
    # Garbled bytes make the unpickler raise almost anything, as its documentation says.
    except Exception as error:
        raise DataError(f"{file} is damaged; get {what}'s python version anew.") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a {what} batch; get {what}'s python version anew.")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in content.items()}


class _Refused(pickle.UnpicklingError):
    pass


class _ArraysOnly(pickle.Unpickler):
    """Containers, text, numbers and arrays of bytes; every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[module, name]


class Pixels:
    """Takes what numpy pickles of an array, and keeps it only if it is one of bytes.

    numpy's own ``__setstate__`` believes a dtype's flags, which a hostile file may forge.
    """

    pixels: np.ndarray | None = None  # of the class: a pickle may make one without its __init__

    def __init__(self, *_: object) -> None:
        """Whatever numpy would be told first: the state says it again."""

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
    ("numpy.core.multiarray", "_reconstruct"): Pixels,
    ("numpy._core.multiarray", "_reconstruct"): Pixels,
    ("numpy", "ndarray"): Pixels,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}
