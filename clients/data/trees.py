"""Trees of pictures, in folders or in zips, listed and read by one name each."""

from __future__ import annotations

import io
import os
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fedsim.clients.data.listing import LARGE, Listing, keep_listing, mark_of, recall_listing
from fedsim.clients.data.pictures import MOST_BYTES
from fedsim.clients.data.progress import bar
from fedsim.core.cache import cache_file
from fedsim.core.errors import DataError

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
SPLITS = ("train", "test", "val")
SETTLED = 2.0  # seconds; a folder that changed more recently may change again unnoticed
STEP = 1_000  # pictures between two moves of the bar
SMALL = 16 << 20  # bytes; a smaller member of a zip may be packed as well as it likes
MOST_PACKED = 100  # times smaller in a zip


class Tree(Protocol):
    """Pictures named ``folder/.../picture``."""

    @property
    def where(self) -> str:
        """The absolute place, for messages and as the tree's identity."""

    def listing(self) -> Listing:
        """Every picture; those in zips can be read only after this."""

    def stamp(self, name: str) -> str:
        """What changes when the picture's file does."""

    def open(self, name: str) -> BinaryIO: ...

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
    return ZipTree(zips) if zips and not folder.has_pictures() else folder


class FolderTree:
    """Pictures in folders; symbolic links are followed.

    The listing of a large tree is kept, and taken again while no folder in it has changed: a folder
    changes when a file comes, goes or is replaced, not when one is overwritten.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def where(self) -> str:
        return str(self._root)

    def has_pictures(self) -> bool:
        try:
            return next(self._walk(self.where, "", frozenset(), {}), None) is not None
        except PermissionError as error:
            raise _forbidden(error) from error

    def listing(self) -> Listing:
        file = cache_file("listing", self.where, ".npz")
        if (remembered := recall_listing(file)) and self._unchanged(remembered[1]):
            return remembered[0]
        began = time.time()
        directories: dict[str, os.stat_result] = {}
        try:
            listing = Listing.of(self._marks(directories))
        except PermissionError as error:
            raise _forbidden(error) from error
        newest = max(max(d.st_mtime, d.st_ctime) for d in directories.values())
        if len(listing) > LARGE and newest < began - SETTLED:
            stamps = {prefix: _folder_stamp(status) for prefix, status in directories.items()}
            keep_listing(file, listing, stamps)
        return listing

    def _unchanged(self, directories: dict[str, str]) -> bool:
        try:
            return all(
                _folder_stamp(os.stat(self._root / prefix)) == stamp
                for prefix, stamp in directories.items()
            )
        except OSError:
            return False

    def _marks(self, directories: dict[str, os.stat_result]) -> dict[str, int]:
        marks: dict[str, int] = {}
        with ExitStack() as stack:
            advance = None
            for name, path in self._walk(self.where, "", frozenset(), directories):
                marks[name] = mark_of(name, _stamp(path))
                if len(marks) == LARGE:
                    advance = stack.enter_context(bar("listing the pictures", None))
                    advance(LARGE)
                elif advance and len(marks) % STEP == 0:
                    advance(STEP)
        return marks

    def _walk(
        self,
        folder: str,
        prefix: str,
        above: frozenset[str],
        directories: dict[str, os.stat_result],
    ) -> Iterator[tuple[str, str]]:
        """Name and path of every picture; notes each folder as it was before it was read."""
        real = os.path.realpath(folder)
        if real in above:  # a link that leads back to a folder around it
            return
        directories[prefix] = os.stat(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    inner = f"{prefix}{entry.name}/"
                    yield from self._walk(entry.path, inner, above | {real}, directories)
                elif _is_picture(entry.name):
                    yield prefix + entry.name, entry.path

    def stamp(self, name: str) -> str:
        return _stamp(os.path.join(self._root, name))

    def open(self, name: str) -> BinaryIO:
        return open(os.path.join(self._root, name), "rb")

    def read(self, name: str) -> bytes:
        with open(os.path.join(self._root, name), "rb") as file:
            _refuse_size(name, os.fstat(file.fileno()).st_size)
            return file.read()


class ZipTree:
    """Pictures in one or more zips, read without extracting.

    Of several zips, one whose members are not under ``train/`` or ``test/`` is taken for the split
    that its file name tells.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._members: dict[str, tuple[Path, str]] = {}
        self._open: dict[Path, zipfile.ZipFile] = {}
        self._pid = os.getpid()

    @property
    def where(self) -> str:
        return ", ".join(str(path) for path in self._paths)

    def listing(self) -> Listing:
        self._members = {}
        for path in self._paths:
            infos = [info for info in self._archive(path).infolist() if _is_member(info)]
            prefix = self._split_of(path, infos)
            for info in infos:
                name = prefix + info.filename.lstrip("/")
                if name in self._members:
                    raise DataError(
                        f"'{name}' is twice in {self.where}; "
                        "put the pictures of each zip under a train/ or test/ folder."
                    )
                self._members[name] = (path, info.filename)
        return Listing.of({name: mark_of(name, self.stamp(name)) for name in self._members})

    def stamp(self, name: str) -> str:
        path, member = self._members[name]
        info = self._archive(path).getinfo(member)
        return f"{info.file_size}-{info.CRC:08x}"

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def _split_of(self, path: Path, infos: list[zipfile.ZipInfo]) -> str:
        has_splits = any(part in SPLITS for i in infos for part in i.filename.split("/")[:2])
        if len(self._paths) == 1 or has_splits:
            return ""
        named = [split for split in SPLITS if split in path.stem.lower()]
        return f"{named[0]}/" if named else ""

    def read(self, name: str) -> bytes:
        path, member = self._members[name]
        archive = self._archive(path)
        info = archive.getinfo(member)
        _refuse_member(info, path)
        try:
            with archive.open(info) as file:
                return file.read(info.file_size + 1)  # by a bound, or it is unpacked all at once
        except (zipfile.BadZipFile, RuntimeError, zlib.error, EOFError) as error:
            raise OSError(f"{member} in {path}: {error}") from error

    def _archive(self, path: Path) -> zipfile.ZipFile:
        if self._pid != os.getpid():  # after a fork, two processes would share one file position
            self._open, self._pid = {}, os.getpid()
        if path not in self._open:
            try:
                self._open[path] = zipfile.ZipFile(path)
            except Exception as error:  # a garbled zip makes the reader raise almost anything
                raise DataError(
                    f"{path} cannot be read as a zip ({error}); get it anew."
                ) from error
        return self._open[path]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _SUFFIXES


def _is_member(info: zipfile.ZipInfo) -> bool:
    hidden = any(part.startswith((".", "__MACOSX")) for part in info.filename.split("/"))
    return not info.is_dir() and not hidden and _is_picture(info.filename)


def _refuse_member(info: zipfile.ZipInfo, path: Path) -> None:
    """Raise for a member of a zip that is packed as no picture is."""
    name = f"{info.filename} in {path}"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise OSError(f"{name} is packed in another way than stored or deflated")
    if info.file_size > max(SMALL, MOST_PACKED * info.compress_size):
        raise OSError(f"{name} would be more than {MOST_PACKED} times as large as in its zip")
    _refuse_size(name, info.file_size)


def _refuse_size(name: str, size: int) -> None:
    if size > MOST_BYTES:
        raise OSError(f"{name} has {size >> 20} MB, more than any picture")


def _stamp(path: str) -> str:
    if not os.access(path, os.R_OK):  # or a broken link: asked again once it is readable
        return "unreadable"
    status = os.stat(path)
    return f"{status.st_size}-{status.st_mtime_ns}"


def _folder_stamp(status: os.stat_result) -> str:
    # The inode's time as well: copying tools set the time of modification as they like.
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def _forbidden(error: PermissionError) -> DataError:
    return DataError(f"the folder '{error.filename}' may not be read; change its permissions.")
