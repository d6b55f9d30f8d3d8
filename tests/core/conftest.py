"""What tests of weights share: an archive of AlexNet's layers."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

from fedsim.core.weights import BACKBONES

ALEX = BACKBONES["lpips-alex"]


def archive(path: Path, content: object) -> Path:
    """A package like the registry's: one pickle in a tar."""
    raw = pickle.dumps(content, protocol=3)
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(f"package-1/{ALEX.packaged}")
        member.size = len(raw)
        tar.addfile(member, io.BytesIO(raw))
    return path
