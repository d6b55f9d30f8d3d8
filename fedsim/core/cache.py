"""Cache: results that need not be worked out again, as files in one folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$FEDSIM_CACHE``, or ``~/.cache/fedsim``."""
    return Path(os.environ.get("FEDSIM_CACHE") or "~/.cache/fedsim").expanduser()


def weights_folder() -> Path:
    """``$FEDSIM_WEIGHTS``, or ``weights`` in the cache."""
    folder = os.environ.get("FEDSIM_WEIGHTS")
    return Path(folder).expanduser() if folder else cache_folder() / "weights"


def cache_file(kind: str, key: str, suffix: str) -> Path:
    """The file for ``key``, whatever its characters and length."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return cache_folder() / f"{kind}-{digest[:32]}{suffix}"


def keep(file: Path, content: bytes) -> None:
    """Write the file whole or not at all; where that fails, the work is only done again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


def keep_lines(file: Path, lines: list[str]) -> None:
    """Append lines in one write, so that several processes may do it at once."""
    content = "".join(f"{line}\n" for line in lines).encode("ascii")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab", buffering=0) as stream:
            stream.write(content)
    except OSError:
        return  # as in `keep`
