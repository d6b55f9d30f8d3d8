"""Listing: the pictures of a tree by name; a million names take some tens of megabytes."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.core.cache import keep

LARGE = 20_000  # pictures; a larger tree is listed by its folders and checked by its files' ends


class Names:
    """Names by number, in one run of bytes: string objects would take three times the room."""

    def __init__(self, blob: bytes, starts: np.ndarray, ends: np.ndarray) -> None:
        self._blob, self._starts, self._ends = blob, starts, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        # Names that are not valid text in the file system's encoding exist, and count too.
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        return cls.cut(b"".join(encoded), np.array([len(name) for name in encoded], dtype=np.int64))

    @classmethod
    def cut(cls, blob: bytes, lengths: np.ndarray) -> Names:
        ends = np.cumsum(lengths, dtype=np.int64)
        return cls(blob, ends - lengths, ends)

    @property
    def lengths(self) -> np.ndarray:
        return self._ends - self._starts

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        piece = self._blob[self._starts[index] : self._ends[index]]
        return piece.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def take(self, rows: np.ndarray) -> Names:
        """Those of ``rows``, without a copy of their bytes."""
        return Names(self._blob, self._starts[rows], self._ends[rows])

    @property
    def blob(self) -> bytes:
        """All bytes; only for names that were not taken from others."""
        return self._blob


@dataclass(frozen=True)
class Listing:
    """Every picture of a tree, sorted by name."""

    names: Names
    marks: np.ndarray  # uint64, of name and stamp: changes when the file does
    folders: tuple[str, ...]  # that hold pictures; "" is the root
    folder_of: np.ndarray  # int32, into ``folders``

    @classmethod
    def of(cls, marks: Mapping[str, int]) -> Listing:
        names = sorted(marks)
        folders: dict[str, int] = {}
        folder_of = [folders.setdefault(n.rpartition("/")[0], len(folders)) for n in names]
        return cls(
            Names.of(names),
            np.array([marks[name] for name in names], dtype=np.uint64),
            tuple(folders),
            np.array(folder_of, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.names)


def mark_of(name: str, stamp: str) -> int:
    """64 bits: of a million pictures two are taken for one another once in 30 million trees."""
    text = f"{name}\0{stamp}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def keep_listing(file: Path, listing: Listing, directories: Mapping[str, str]) -> None:
    """Remember a listing with the stamps of the directories it was made from."""
    stream = io.BytesIO()
    np.savez(
        stream,
        blob=np.frombuffer(listing.names.blob, dtype=np.uint8),
        lengths=listing.names.lengths.astype(np.int32),
        marks=listing.marks,
        folder_of=listing.folder_of,
        folders=_to_bytes(listing.folders),
        directories=_to_bytes(dict(directories)),
    )
    keep(file, stream.getvalue())


def recall_listing(file: Path) -> tuple[Listing, dict[str, str]] | None:
    """What ``keep_listing`` kept; None where there is nothing, or it is spoilt."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            names = Names.cut(arrays["blob"].tobytes(), arrays["lengths"].astype(np.int64))
            folders = tuple(json.loads(arrays["folders"].tobytes()))
            listing = Listing(names, arrays["marks"], folders, arrays["folder_of"])
            return listing, json.loads(arrays["directories"].tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _to_bytes(content: object) -> np.ndarray:
    return np.frombuffer(json.dumps(content).encode("ascii"), dtype=np.uint8)
