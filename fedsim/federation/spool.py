"""Spool: updates on disk, shown to a Flower strategy as if they were in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import assert_never

import numpy as np
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedsim.core.learning import Update
from fedsim.core.observation import read_update
from fedsim.core.spec import Upload

_Stamp = tuple[Path, int, int]


def as_weights(sent: Mapping[str, Tensor], source: Update | Path, lr: float) -> ArrayRecord:
    """A client's new weights: what it was sent, moved by its update (in memory or on disk)."""
    change = _Change(source, lr)
    arrays = ArrayRecord()
    for name, tensor in sent.items():
        arrays[name] = _LazyArray(tensor, partial(change.applied_to, name, tensor))
    return arrays


class _Change:
    """What one update does to the weights, read from disk when asked for.

    Only the last update read stays in memory.
    """

    _last: tuple[_Stamp, Update] | None = None  # shared by all replies

    def __init__(self, source: Update | Path, lr: float):
        self.source, self.lr = source, lr

    def applied_to(self, name: str, sent: Tensor) -> Tensor:
        update = self._update()
        if name in update.buffers:
            return update.buffers[name]
        if name not in update.tensors:
            return sent  # frozen or withheld: stays as it was
        match update.kind:
            case Upload.GRADIENT:
                return sent - self.lr * update.tensors[name]
            case Upload.DELTA:
                return sent + update.tensors[name]
            case other:
                assert_never(other)

    def _update(self) -> Update:
        if isinstance(self.source, Update):
            return self.source.widened()
        last, stamp = _Change._last, _stamp(self.source)
        if last is None or last[0] != stamp:
            _Change._last = last = (stamp, read_update(self.source).widened())
        return last[1]


def _stamp(path: Path) -> _Stamp:
    """Which file is there now: another run in this process may have had its own under that name."""
    about = path.stat()
    return path, about.st_ino, about.st_mtime_ns


class _LazyArray(Array):
    """A Flower array whose numbers are read when somebody asks for them."""

    def __init__(self, like: Tensor, read: Callable[[], Tensor]):
        self.dtype = str(like.dtype).removeprefix("torch.")
        self.shape = tuple(like.shape)
        self.stype = "numpy.ndarray"
        self._read = read

    def numpy(self) -> np.ndarray:
        """A copy: what a strategy does to it in place must not reach the model that was sent, nor
        what other replies are made from."""
        return self._read().numpy().copy()

    @property
    def data(self) -> bytes:  # type: ignore[override]
        buffer = io.BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()
