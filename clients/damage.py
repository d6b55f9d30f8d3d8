"""Which pictures of a tree cannot be decoded: found once, remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from clients.pictures import DAMAGED, decode
from clients.trees import Tree

PROGRESS_FROM = 500  # pictures; fewer are decoded before a bar could be read
CHUNK = 64


def damaged_pictures(tree: Tree, stamps: Mapping[str, str]) -> frozenset[str]:
    """The names, of those in ``stamps``, whose pictures cannot be decoded in full.

    The answer is kept under the tree's place and every file's stamp, so another process decodes
    nothing, and a changed file makes a new answer.
    """
    cache = _cache_file(tree, stamps)
    known = _recall(cache)
    if known is None:
        known = _decode_all(tree, list(stamps))
        _remember(cache, known, len(stamps))
    return frozenset(known)


def cache_folder() -> Path:
    """``$FEDSIM_CACHE``, or ``~/.cache/fedsim``."""
    return Path(os.environ.get("FEDSIM_CACHE") or "~/.cache/fedsim").expanduser()


def _cache_file(tree: Tree, stamps: Mapping[str, str]) -> Path:
    key = hashlib.sha256(json.dumps([tree.where, sorted(stamps.items())]).encode())
    return cache_folder() / f"pictures-{key.hexdigest()[:32]}.json"


def _recall(cache: Path) -> list[str] | None:
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
        return [str(name) for name in content["damaged"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or spoilt: find out again


def _remember(cache: Path, damaged: list[str], pictures: int) -> None:
    text = json.dumps({"pictures": pictures, "damaged": damaged}, indent=1)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache.parent, prefix=cache.stem, suffix=".tmp")
    except OSError:
        return  # without a cache the pictures are only decoded again next time
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, cache)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


def _decode_all(tree: Tree, names: list[str]) -> list[str]:
    def damaged_of(chunk: list[str]) -> list[str]:
        return [name for name in chunk if not _is_whole(tree, name)]

    chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]
    damaged: list[str] = []
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    console = Console(stderr=True)
    shown = len(names) >= PROGRESS_FROM and console.is_terminal
    bar = Progress(console=console, transient=True, disable=not shown)
    try:
        with bar:
            task = bar.add_task("checking the pictures", total=len(names))
            for chunk, found in zip(chunks, pool.map(damaged_of, chunks), strict=True):
                damaged += found
                bar.advance(task, len(chunk))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the whole tree
    return damaged


def _is_whole(tree: Tree, name: str) -> bool:
    try:
        decode(tree.read(name))
    except DAMAGED:
        return False
    return True
