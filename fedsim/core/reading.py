"""Reading: files of a folder that may come from anybody.

A name in a run that somebody shared can be a link to any file of whoever reads it, a pipe that
nobody writes to, or a device without an end. Such names are not opened, or not read: what is wrong
is an OSError like any other. The folder itself may be a link, as may those above it: where a run
lies is its user's own choice.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 256 * 2**20  # of a table or a picture
MOST_JSON = 64 * 2**20  # as objects it is many times as large


@contextmanager
def opened(path: Path, *, links: bool = False) -> Iterator[BinaryIO]:
    """A file, open to be read; ``links`` are followed where the user named it."""
    flags = os.O_RDONLY | os.O_NONBLOCK  # otherwise a pipe is waited for
    try:
        handle = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        yield file


def read_file(path: Path, most: int | None = MOST_BYTES, *, links: bool = False) -> bytes:
    """What is in a file of at most so many bytes, None: of any size."""
    with opened(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it is too large ({size / 2**20:.0f} MB)", str(path))
        return file.read(size)
