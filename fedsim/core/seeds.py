"""Seeds that depend on a text alone: the same on every machine, in every process."""

from __future__ import annotations

import hashlib


def seed_from(text: str, *, size: int = 6) -> int:
    """A number of ``size`` bytes, from the beginning of the text's hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big")
