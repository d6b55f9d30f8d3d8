"""Digests: pictures told by their pixels, whatever their files are called and wherever they lie."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import torch

from fedsim.clients.data.pictures import ImageSet
from fedsim.clients.data.progress import bar
from fedsim.core.cache import cache_file, keep
from fedsim.core.errors import DataError

UNREADABLE = "-"  # in place of the digest of a picture that cannot be decoded
_PROGRESS_FROM = 2_000  # pictures; fewer are done before a bar could be read
_LINE = re.compile(r"[0-9a-f]{24}|-")


def pixel_digest(picture: torch.Tensor) -> str:
    """Of the picture in 8 bits: the same for a copy in any lossless format."""
    coarse = (picture * 255).round().to(torch.uint8)
    return hashlib.sha256(coarse.contiguous().numpy().tobytes()).hexdigest()[:24]


def digests_of(images: ImageSet, rows: np.ndarray) -> list[str]:
    """The digest of each of these pictures; of a set that has a stamp, kept between runs."""
    file = _cache(images, rows)
    if file is not None and (known := _recalled(file, len(rows))) is not None:
        return known
    with bar("comparing the pictures", len(rows), len(rows) >= _PROGRESS_FROM) as advance:
        digests = []
        for row in rows:
            try:
                digests.append(pixel_digest(images.image(int(row))))
            except DataError:  # whoever needs this picture will be told
                digests.append(UNREADABLE)
            advance(1)
    if file is not None:
        keep(file, "\n".join(digests).encode("ascii"))
    return digests


def _cache(images: ImageSet, rows: np.ndarray) -> Path | None:
    if images.stamp is None:
        return None
    which = hashlib.sha256(rows.astype(np.int64).tobytes()).hexdigest()
    return cache_file("pixels", f"{images.stamp} {which}", ".txt")


def _recalled(file: Path, count: int) -> list[str] | None:
    try:
        lines = file.read_text(encoding="ascii").split("\n")
    except (OSError, ValueError):  # not there, or spoilt: computed again
        return None
    whole = len(lines) == count and all(_LINE.fullmatch(line) for line in lines)
    return lines if whole else None
