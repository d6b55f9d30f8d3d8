"""Spool: updates on disk, shown to a Flower strategy as if they were in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from safetensors.torch import load_file
from torch import Tensor

from fedsim.core.learning import Update


def as_weights(
    sent: Mapping[str, Tensor], source: Update | Path, kind: str, lr: float
) -> ArrayRecord:
    """A client's new weights: what it was sent, moved by its update (in memory or on disk)."""
    change = _Change(source, kind, lr)
    arrays = ArrayRecord()
    for name, tensor in sent.items():
        arrays[name] = _LazyArray(tensor, partial(change.applied_to, name, tensor))
    return arrays


class _Change:
    """What one update does to the weights, read from disk when asked for.

    Only the last update read stays in memory.
    """

    _held: tuple[Path, dict[str, Tensor]] | None = None  # shared by all replies

    def __init__(self, source: Update | Path, kind: str, lr: float):
        self.source, self.kind, self.lr = source, kind, lr

    def applied_to(self, name: str, sent: Tensor) -> Tensor:
        tensors = self._tensors()
        if (buffer := tensors.get(f"buffer/{name}")) is not None:
            return buffer
        if (change := tensors.get(f"update/{name}")) is None:
            return sent  # frozen or withheld: stays as it was
        return sent - self.lr * change if self.kind == "gradient" else sent + change

    def _tensors(self) -> dict[str, Tensor]:
        if isinstance(self.source, Update):
            tensors = {f"update/{n}": t for n, t in self.source.tensors.items()}
            return tensors | {f"buffer/{n}": t for n, t in self.source.buffers.items()}
        held = _Change._held
        if held is None or held[0] != self.source:
            _Change._held = held = (self.source, load_file(self.source))
        return held[1]


class _LazyArray(Array):
    """A Flower array whose numbers are read when somebody asks for them."""

    def __init__(self, like: Tensor, read: Callable[[], Tensor]):
        self.dtype = str(like.dtype).removeprefix("torch.")
        self.shape = tuple(like.shape)
        self.stype = "numpy.ndarray"
        self._read = read

    def numpy(self) -> np.ndarray:
        return self._read().numpy()

    @property
    def data(self) -> bytes:  # type: ignore[override]
        buffer = io.BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()
