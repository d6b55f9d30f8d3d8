"""Where fedsim keeps what is worth keeping between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$FEDSIM_CACHE``, or ``~/.cache/fedsim``."""
    return Path(os.environ.get("FEDSIM_CACHE") or "~/.cache/fedsim").expanduser()


def weights_folder() -> Path:
    """``$FEDSIM_WEIGHTS``, or ``weights`` in the cache."""
    told = os.environ.get("FEDSIM_WEIGHTS")
    return Path(told).expanduser() if told else cache_folder() / "weights"
