"""Hub: data sets of Hugging Face's, or saved by its ``datasets`` library: ``hf:<name>``.

The library opens what a picture's row names, a file or an address, as soon as the row is looked at.
So no column is looked at but three: pictures, which are never decoded by it, and the classes and
people of numbers or words.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim.clients.data.folders import TEST_FRACTION, hash_of
from fedsim.clients.data.pictures import DAMAGED, MOST_BYTES, ImageSet, Split, decode, to_tensor
from fedsim.core.errors import DataError, did_you_mean
from fedsim.core.spec import DataSpec
from fedsim.core.text import brief

PREFIX = "hf:"
_HUB_SECONDS = 5.0  # the hub's own client tries for half a minute and more
_PLAIN = re.compile(r"u?int\d+|bool|(large_)?string|string_view")  # types of plain columns
_TESTS = ("test", "validation", "valid", "val")
_GROUPS = ("writer_id", "celeb_id", "identity", "user_id", "client_id", "user", "speaker_id")


class _HubImages(ImageSet):
    """One split; the pictures stay in the library's files until they are asked for.

    A row may name a file instead of holding a picture, and rows come from anybody: only files in
    the data set's own ``folders`` are opened.
    """

    def __init__(
        self,
        table: Any,
        column: str,
        rows: np.ndarray,
        image_size: int,
        folders: tuple[Path, ...],
    ) -> None:
        self._table, self._column, self._rows = table, column, rows
        self._image_size, self._folders = image_size, folders

    def image(self, index: int) -> torch.Tensor:
        row = int(self._rows[index])
        entry = self._table[row][self._column]
        try:
            picture = decode(entry["bytes"] or self._file(row, entry["path"]).read_bytes())
        except (*DAMAGED, TypeError) as error:
            raise DataError(
                f"picture {row} of the data set cannot be decoded; get the data set anew."
            ) from error
        return to_tensor(picture, self._image_size)

    def _file(self, row: int, path: str) -> Path:
        file = Path(path).resolve()
        if not any(file.is_relative_to(folder) for folder in self._folders):
            raise DataError(
                f"picture {row} of the data set names a file outside of it ('{path}'), which is "
                f"not opened; do not trust this data set."
            )
        if file.stat().st_size > MOST_BYTES:
            raise OSError("more than any picture")
        return file


def load_hub(data: DataSpec, split: Split) -> ImageSet:
    """One split of ``hf:owner/name`` or ``hf:owner/name:config``, or of what lies at ``data.path``.

    The first column of pictures, labelled by the column ``data.label`` or the first of classes; who
    made them, by the first column of a known name. A split called test, or else validation, is for
    test if it has labels; where there is none, a fifth of the rows by a hash of their numbers.
    """
    title = data.path or data.name.removeprefix(PREFIX)
    with _silent():
        splits = _open_folder(data.path) if data.path else _open_hub(title)
    if not splits:
        raise DataError(f"{title} holds no table; use another data set.")
    first = splits.get("train") or next(iter(splits.values()))
    image, chosen = _columns(first.features, title, data.label)
    held_out = next((s for s in _TESTS if s in splits and _labelled(splits[s], chosen)), None)
    if held_out and len(splits) > 1 and "train" in splits:
        table = splits["train" if split == "train" else held_out]
        rows = np.arange(len(table))
    else:
        table = first
        hashes = np.array([hash_of(str(row)) for row in range(len(table))])
        rows = np.flatnonzero((hashes < TEST_FRACTION) == (split == "test"))
    classes, numbers = _classes(first, table, chosen)
    rows = rows[numbers[rows] >= 0]  # -1 is the hub's sign for a hidden label
    if not len(rows):
        raise DataError(f"{title} has no labelled picture for {split}; use another data set.")
    pictures = _pictures_only(table, image, title)
    images = _HubImages(pictures, image, rows, data.image_size, _folders(data))
    images.classes, images.labels = classes, numbers[rows]
    group = next((g for g in _GROUPS if _is_plain(table.features.get(g))), None)
    if group:
        people = _values(table, group)
        images.groups = _numbered(people, sorted(set(people)))[rows]
    return images


def _folders(data: DataSpec) -> tuple[Path, ...]:
    """Where the pictures of a data set may lie: in its folder, or in what the library fetched."""
    import datasets
    from huggingface_hub import constants

    if data.path:
        return (Path(data.path).expanduser().resolve(),)
    name = data.name.removeprefix(PREFIX).partition(":")[0]
    fetched = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return fetched.resolve(), Path(datasets.config.EXTRACTED_DATASETS_PATH).resolve()


def _open_folder(path: str) -> dict[str, Any]:
    import datasets

    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"data.path '{path}' is no folder; give a data set saved by datasets.")
    saved = any((root / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(str(root))
    except Exception as error:  # the library does not expect files that others made up
        raise DataError(
            f"{root} cannot be read as a data set ({_first_line(error)}); save it anew."
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _open_hub(title: str) -> dict[str, Any]:
    import datasets
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    name, _, config = title.partition(":")
    if not name:
        raise DataError("data.name 'hf:' names no data set; write hf:owner/name.")
    # The library takes such a name for a reader of its own (one reads pickles) or a folder here.
    reader = Path(datasets.__file__).parent / "packaged_modules" / name
    if reader.is_dir() or Path(name).is_dir():
        raise DataError(
            f"'{name}' is no data set of the hub here; write hf:owner/name, or give data.path for "
            "one on this machine."
        )
    reached = True
    try:
        HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    except HfHubHTTPError as error:
        raise DataError(
            f"the hub has no data set '{name}' for you ({_first_line(error)}); check its name and "
            "your access."
        ) from error
    except ValueError as error:
        raise DataError(f"'{name}' is no name of a data set; write hf:owner/name.") from error
    except (OSError, httpx.HTTPError):
        reached = False
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        if not reached:  # what was downloaded before is found without asking again and again
            datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        return dict(datasets.load_dataset(name, config or None))
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        if not reached:
            raise DataError(
                f"the hub does not answer and '{name}' is not in the local cache; get it where "
                "there is a network, or give data.path for one saved by datasets."
            ) from error
        raise DataError(f"'{title}' cannot be loaded ({_first_line(error)}).") from error
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _columns(features: Any, title: str, label: str | None) -> tuple[str, str]:
    """The column of pictures and the one of labels."""
    import datasets

    pictures = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    if not pictures:
        raise DataError(f"{title} has no column of pictures; it has {', '.join(features)}.")
    others = [name for name in features if name not in pictures]
    if label is not None:
        if label not in others:
            raise DataError(
                f"{title} has no column '{label}'{did_you_mean(label, others)}; "
                f"data.label is one of: {', '.join(others)}."
            )
        return pictures[0], label
    labels = [name for name in others if isinstance(features[name], datasets.ClassLabel)]
    labels = labels or [name for name in others if name in ("label", "labels")]
    if not labels:
        raise DataError(f"{title} has no column of classes; set data.label to one of: {others}.")
    return pictures[0], labels[0]


def _labelled(table: Any, column: str) -> bool:
    """Whether any row has a class: that of a hidden one is -1, or none."""
    if not _is_plain(table.features.get(column)):
        return False
    values = (value for value in _column(table, column) if value is not None)
    return any(isinstance(value, str | bool) or value >= 0 for value in values)


def _classes(first: Any, table: Any, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The class names, and each row's number; -1 for a value that is no class of ``first``."""
    import datasets

    for part in (first, table):
        if not _is_plain(part.features.get(column)):
            raise DataError(f"the column '{column}' holds no classes; set data.label to another.")
    values, kind = _values(table, column), first.features[column]
    if not isinstance(kind, datasets.ClassLabel):
        known = sorted(set(_values(first, column)))
        return tuple(str(k) for k in known), _numbered(values, known)
    names = tuple(kind.names)
    for row, value in enumerate(values):
        if not isinstance(value, int) or not -1 <= value < len(names):
            raise DataError(
                f"row {row} of the data set is of class {brief(value)} by its column '{column}', "
                f"and there are {len(names)}; do not trust this data set."
            )
    return names, np.array(values, dtype=np.int64)


def _is_plain(kind: Any) -> bool:
    """Whether a column is of numbers or words: of another, a look may open files and addresses."""
    import datasets

    if isinstance(kind, datasets.ClassLabel):
        return True
    return isinstance(kind, datasets.Value) and _PLAIN.fullmatch(kind.dtype) is not None


def _column(table: Any, column: str) -> list[Any]:
    """A column as it lies there, None where a row has no value; however the table would show it."""
    values: list[Any] = table.select_columns([column]).with_format(None)[column][:]
    return values


def _values(table: Any, column: str) -> list[Any]:
    """A column of numbers or words in which every row has a value."""
    values = _column(table, column)
    if None in values:
        raise DataError(
            f"row {values.index(None)} of the data set has no value in its column '{column}'; fill "
            f"it in, or leave such rows out."
        )
    return values


def _numbered(values: list[Any], known: list[Any]) -> np.ndarray:
    """The place of each value among those that are known, -1 where it is not."""
    numbers = {value: number for number, value in enumerate(known)}
    return np.array([numbers.get(value, -1) for value in values], dtype=np.int64)


def _pictures_only(table: Any, column: str, title: str) -> Any:
    import datasets

    if not isinstance(table.features.get(column), datasets.Image):
        raise DataError(f"{title} has no column '{column}' of pictures in one of its splits.")
    bare = table.select_columns([column]).with_format(None)
    return bare.cast_column(column, datasets.Image(decode=False))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def _silent() -> Iterator[None]:
    """One sentence of ours instead of the hub client's lines about each attempt."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        hub.setLevel(level)
