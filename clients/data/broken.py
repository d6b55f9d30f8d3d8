"""Broken pictures of a tree, which cannot be decoded: found once, remembered on disk.

The pictures of a small tree are decoded once, all of them. That would take hours for millions, so
the files of a large tree are only looked at: a header must give a size and the end must be there.
What passes that and still cannot be decoded when it is asked for is remembered, and left out of the
next run.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedsim.clients.data.listing import LARGE, Listing, mark_of
from fedsim.clients.data.pictures import DAMAGED, decode, opened
from fedsim.clients.data.progress import bar
from fedsim.clients.data.trees import Tree
from fedsim.core.cache import cache_file, cache_folder, keep, keep_lines

_PROGRESS_FROM = 500  # pictures; fewer are decoded before a bar could be read
CHUNK = 64  # pictures a thread takes at once
BLOCK = 50_000  # pictures of a large tree after which the cache is written
_TAIL = 1024  # bytes in which a file's end is looked for: some writers add a few of their own
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


def damaged_pictures(tree: Tree, listing: Listing, rows: np.ndarray) -> np.ndarray:
    """For each of ``rows``, whether its picture is damaged.

    The answer is kept under the tree's place and every file's mark, so another process opens
    nothing, and a changed file is looked at again.
    """
    if len(rows) > LARGE:
        return _damaged_of_many(tree, listing, rows)
    names = list(listing.names.take(rows))
    cache = _cache_file(tree, names, listing.marks[rows])
    known = _recall(cache)
    if known is None:
        with bar("checking the pictures", len(names), len(names) >= _PROGRESS_FROM) as advance:
            known = _fail(lambda name: _is_whole(tree, name), names, advance)
        content = {"pictures": len(names), "damaged": known}
        keep(cache, json.dumps(content, indent=1).encode("ascii"))
    bad = set(known)
    return np.array([name in bad for name in names], dtype=bool)


def remember_damage(tree: Tree, name: str, mark: int) -> None:
    """Leave this picture of a large tree out of the next run, unless its file changes."""
    keep_lines(_damage_file(tree), [f"{mark:016x} {mark_of(name, tree.stamp(name)):016x}"])


def _cache_file(tree: Tree, names: list[str], marks: np.ndarray) -> Path:
    key = hashlib.sha256(json.dumps([tree.where, names]).encode("ascii") + marks.tobytes())
    return cache_folder() / f"pictures-{key.hexdigest()[:32]}.json"


def _recall(cache: Path) -> list[str] | None:
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
        return [str(name) for name in content["damaged"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or spoilt: find out again


def _fail(
    passes: Callable[[str], bool], names: Sequence[str], advance: Callable[[int], None]
) -> list[str]:
    """The names that do not pass, in order; asked in threads."""

    def failing(chunk: list[str]) -> list[str]:
        return [name for name in chunk if not passes(name)]

    chunks = [list(names[i : i + CHUNK]) for i in range(0, len(names), CHUNK)]
    failed: list[str] = []
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for chunk, bad in zip(chunks, pool.map(failing, chunks), strict=True):
            failed += bad
            advance(len(chunk))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the whole tree
    return failed


def _is_whole(tree: Tree, name: str) -> bool:
    try:
        decode(tree.read(name))
    except DAMAGED:
        return False
    return True


# Large trees


def _damaged_of_many(tree: Tree, listing: Listing, rows: np.ndarray) -> np.ndarray:
    marks = listing.marks[rows]
    damaged = np.zeros(len(rows), dtype=bool)
    checked_file = cache_file("checked", tree.where, ".npy")
    checked = _recall_checked(checked_file)
    new = np.flatnonzero(~_among(marks, checked))
    if len(new):
        checked = checked[np.isin(checked, listing.marks)]
        with bar("checking the pictures", len(new)) as advance:
            for start in range(0, len(new), BLOCK):  # what is done before Ctrl-C stays done
                block = new[start : start + BLOCK]
                damaged[block] = _look_at(tree, listing, rows[block], advance)
                checked = np.union1d(checked, marks[block])  # sorted
                stream = io.BytesIO()
                np.save(stream, checked)
                keep(checked_file, stream.getvalue())

    remembered = _recall_damage(_damage_file(tree))
    suspects = np.flatnonzero(np.isin(marks, np.array([m for m, _ in remembered], dtype=np.uint64)))
    for at in suspects:
        name = listing.names[rows[at]]
        # The listing may be older than the file: one that was put right in place is whole again.
        known = (int(marks[at]), mark_of(name, tree.stamp(name))) in remembered
        damaged[at] = known or not _seems_whole(tree, name)
    return damaged


def _look_at(
    tree: Tree, listing: Listing, rows: np.ndarray, advance: Callable[[int], None]
) -> np.ndarray:
    names = list(listing.names.take(rows))
    failed = set(_fail(lambda name: _seems_whole(tree, name), names, advance))
    damaged = np.array([name in failed for name in names], dtype=bool)
    if failed:
        marks = listing.marks[rows[damaged]].tolist()
        keep_lines(_damage_file(tree), [f"{mark:016x} {mark:016x}" for mark in marks])
    return damaged


def _among(marks: np.ndarray, known: np.ndarray) -> np.ndarray:
    """As ``np.isin``, which would sort both anew; ``known`` is sorted."""
    if not len(known):
        return np.zeros(len(marks), dtype=bool)
    nearest = np.searchsorted(known, marks).clip(max=len(known) - 1)
    return known[nearest] == marks


def _damage_file(tree: Tree) -> Path:
    return cache_file("damaged", tree.where, ".txt")


def _recall_checked(file: Path) -> np.ndarray:
    try:
        checked = np.load(file, allow_pickle=False)
        return checked if checked.dtype == np.uint64 else np.array([], dtype=np.uint64)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return np.array([], dtype=np.uint64)


def _recall_damage(file: Path) -> set[tuple[int, int]]:
    """The mark a damaged picture had in the listing, and the one its file had."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        pairs = [line.split(" ") for line in lines if len(line) == 33]
        return {(int(listed, 16), int(actual, 16)) for listed, actual in pairs}
    except (OSError, ValueError):
        return set()


def _seems_whole(tree: Tree, name: str) -> bool:
    try:
        with tree.open(name) as file:
            if _has_both_ends(file):
                return True
    except DAMAGED:
        pass  # the decoder decides
    return _is_whole(tree, name)


def _has_both_ends(file: BinaryIO) -> bool:
    """Whether a size can be read and the file's end is there; False where that says nothing."""
    with opened(file) as picture:
        kind, size = picture.format or "", picture.size
    length = file.seek(0, io.SEEK_END)
    if kind == "WEBP":
        file.seek(4)
        return int.from_bytes(file.read(4), "little") + 8 <= length
    file.seek(max(0, length - _TAIL))
    return kind in _ENDS and min(size) > 0 and _ENDS[kind] in file.read()
