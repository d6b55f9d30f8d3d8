"""Hub: data sets of Hugging Face's, or saved by its ``datasets`` library: ``hf:<name>``."""

from __future__ import annotations

import logging
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

PREFIX = "hf:"
_HUB_SECONDS = 5.0  # the hub's own client tries for half a minute and more
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

    The first column of pictures, labelled by the column ``data.label`` or the first of classes. A
    split called test, or else validation, is for test if it has labels; where there is none, a
    fifth of the rows by a hash of their numbers.
    """
    title = data.path or data.name.removeprefix(PREFIX)
    with _silent():
        splits = _open_folder(data.path) if data.path else _open_hub(title)
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
    pictures, folders = _pictures_only(table, image), _folders(data)
    images = _HubImages(pictures, image, rows, data.image_size, folders)
    images.classes, images.labels = classes, numbers[rows]
    group = next((g for g in _GROUPS if g in table.features), None)
    if group:
        _, people = np.unique(np.array(table[group][:]), return_inverse=True)
        images.groups = people[rows].astype(np.int64)
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
    values = np.array(table[column][:])
    return len(values) > 0 and (values.dtype.kind != "i" or bool((values >= 0).any()))


def _classes(first: Any, table: Any, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The class names, and each row's number; -1 for a value that is no class of ``first``."""
    import datasets

    values = np.array(table[column][:])
    kind = first.features[column]
    if isinstance(kind, datasets.ClassLabel):
        return tuple(kind.names), values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iubU":
        raise DataError(f"the column '{column}' holds no classes; set data.label to another.")
    known = np.unique(np.array(first[column][:]))
    numbers = np.searchsorted(known, values).clip(max=len(known) - 1)
    return tuple(str(k) for k in known), np.where(known[numbers] == values, numbers, -1)


def _pictures_only(table: Any, column: str) -> Any:
    import datasets

    return table.select_columns([column]).cast_column(column, datasets.Image(decode=False))


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
