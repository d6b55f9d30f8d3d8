"""Devices and threads: where a piece of work runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedsim.core.errors import SpecError


def resolve_device(name: str) -> torch.device:
    """``auto`` is the GPU where this process sees one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SpecError(f"engine.device: torch knows no device '{name}'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"engine.device is '{name}', but torch sees no GPU here.")
    return device


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch on ``count`` CPU threads: the same count gives the same result wherever it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stand_back() -> None:
    """Let others on the same cores go before the thread at hand."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
