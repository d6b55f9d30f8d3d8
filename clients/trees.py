"""Where the pictures of a tree lie: in folders or in zips, listed and read by one name each."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fedsim.core.errors import DataError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
SPLITS = ("train", "test", "val")


class Tree(Protocol):
    """Pictures named ``folder/.../picture``."""

    @property
    def where(self) -> str:
        """The absolute place, for messages and as the tree's identity."""

    def listing(self) -> dict[str, str]:
        """Every picture's name, sorted, and a stamp that changes when its file does."""

    def read(self, name: str) -> bytes: ...


def open_tree(path: str) -> Tree:
    """A folder, a zip, or a folder that holds zips instead of pictures."""
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"data.path '{path}' does not exist; give a folder of pictures.")
    root = root.resolve()
    if root.is_file():
        if not zipfile.is_zipfile(root):
            raise DataError(f"data.path '{path}' is neither a folder nor a zip; give one of them.")
        return ZipTree([root])
    folder = FolderTree(root)
    zips = sorted(file for file in root.glob("*.zip") if file.is_file())
    return ZipTree(zips) if zips and not folder.listing() else folder


class FolderTree:
    """Pictures in folders; symbolic links are followed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def where(self) -> str:
        return str(self._root)

    def listing(self) -> dict[str, str]:
        try:
            return dict(sorted(self._walk(str(self._root), "", frozenset())))
        except PermissionError as error:
            raise DataError(
                f"the folder '{error.filename}' may not be read; change its permissions."
            ) from error

    def _walk(self, folder: str, prefix: str, above: frozenset[str]) -> Iterator[tuple[str, str]]:
        real = os.path.realpath(folder)
        if real in above:  # a link that leads back to a folder around it
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    yield from self._walk(entry.path, f"{prefix}{entry.name}/", above | {real})
                elif _is_picture(entry.name):
                    yield prefix + entry.name, _stamp(entry)

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()


class ZipTree:
    """Pictures in one or more zips, read without extracting.

    Of several zips, one whose members are not under ``train/`` or ``test/`` is taken for the
    split that its own file name tells.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._members: dict[str, tuple[Path, str]] = {}
        self._open: dict[Path, zipfile.ZipFile] = {}
        self._pid = os.getpid()

    @property
    def where(self) -> str:
        return ", ".join(str(path) for path in self._paths)

    def listing(self) -> dict[str, str]:
        stamps: dict[str, str] = {}
        for path in self._paths:
            infos = [info for info in self._archive(path).infolist() if _is_member(info)]
            prefix = self._split_of(path, infos)
            for info in infos:
                name = prefix + info.filename.lstrip("/")
                if name in stamps:
                    raise DataError(
                        f"'{name}' is twice in {self.where}; "
                        "put the pictures of each zip under a train/ or test/ folder."
                    )
                stamps[name] = f"{info.file_size}-{info.CRC:08x}"
                self._members[name] = (path, info.filename)
        return dict(sorted(stamps.items()))

    def _split_of(self, path: Path, infos: list[zipfile.ZipInfo]) -> str:
        told = any(part in SPLITS for i in infos for part in i.filename.split("/")[:2])
        if len(self._paths) == 1 or told:
            return ""
        named = [split for split in SPLITS if split in path.stem.lower()]
        return f"{named[0]}/" if named else ""

    def read(self, name: str) -> bytes:
        path, member = self._members[name]
        try:
            return self._archive(path).read(member)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise OSError(f"{member} in {path}: {error}") from error

    def _archive(self, path: Path) -> zipfile.ZipFile:
        if self._pid != os.getpid():  # after a fork, two processes would share one file position
            self._open, self._pid = {}, os.getpid()
        if path not in self._open:
            try:
                self._open[path] = zipfile.ZipFile(path)
            except (zipfile.BadZipFile, OSError) as error:
                raise DataError(
                    f"{path} cannot be read as a zip ({error}); get it anew."
                ) from error
        return self._open[path]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _is_member(info: zipfile.ZipInfo) -> bool:
    hidden = any(part.startswith((".", "__MACOSX")) for part in info.filename.split("/"))
    return not info.is_dir() and not hidden and _is_picture(info.filename)


def _stamp(entry: os.DirEntry[str]) -> str:
    if not os.access(entry.path, os.R_OK):  # or a broken link: asked again once it is readable
        return "unreadable"
    status = entry.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"
