"""Unpickling of arrays, without running anything the file may ask for.

Old data sets and weights come as pickled dictionaries of numpy arrays. Only what such a file needs
has a stand-in here; anything else it names is refused.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

DTYPES = {"u1", "i1", "i4", "i8", "f2", "f4", "f8"}


class Refused(pickle.UnpicklingError):
    """The pickle asks for something that no file of arrays needs."""


def load_arrays(content: bytes, *, encoding: str = "bytes") -> Any:
    """What was pickled, with every array as `Array`; raises `Refused`, or almost anything where the
    bytes are garbled."""
    return _ArraysOnly(io.BytesIO(content), encoding=encoding).load()


class Array:
    """Stands in for a numpy array while it is read; ``values`` is the array.

    numpy's own ``__setstate__`` believes a dtype's flags, which a hostile file may forge.
    """

    values: np.ndarray | None = None  # of the class: a pickle may make one without its __init__

    def __init__(self, *_: object) -> None:
        """Takes what numpy would be given first, and ignores it: the state says it again."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype):
            raise Refused("an array without a type")
        code = dtype.code.decode() if isinstance(dtype.code, bytes) else str(dtype.code)
        if code not in DTYPES:
            raise Refused(f"an array of {code}")
        flat = np.frombuffer(raw, dtype=np.dtype("<" + code))
        self.values = np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"))


class _Dtype:
    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else str(state[1])
        if order == ">":
            raise Refused("an array in another byte order")


def _latin1(text: str, _codec: object) -> bytes:
    """For ``_codecs.encode``, by which Python 3 writes bytes into an old pickle."""
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}


class _ArraysOnly(pickle._Unpickler):
    """Python's own unpickler: the one in C makes room for as many values as a file announces."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise Refused(f"{module}.{name}")
        return _STAND_INS[module, name]
