"""Ledger: the fields that one attack read, in the order of the first read.

It lies in memory that a forked process shares with the one it came from, and a copy of it is the
ledger itself: so what an attack reads through a copy of its View, or in a child of its own, is
written down as well. It cannot be sent to a process that shares no memory with this one, and
neither can a View, which holds it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from fedsim.core.errors import NotGranted

ROOM = 4096  # bytes; the names of all fields take a tenth of them
_BETWEEN = b"\n"


class Ledger:
    """Names, each once."""

    def __init__(self, names: Iterable[str] = ()):
        self._page = mmap.mmap(-1, ROOM)
        for name in names:
            self.note(name)

    def note(self, name: str) -> None:
        """Write a name down, unless it is there."""
        if name not in self:
            written = self._written() + name.encode() + _BETWEEN
            self._page[: len(written)] = written

    def _written(self) -> bytes:
        return self._page[:].rstrip(b"\0")

    def __iter__(self) -> Iterator[str]:
        return (name.decode() for name in self._written().split(_BETWEEN)[:-1])

    def __copy__(self) -> Ledger:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self

    def __reduce__(self) -> NoReturn:
        raise NotGranted(
            "the attack sent its View to another process, where nobody writes down what is read; "
            "read it first and send what you read."
        )
