"""Dealing: what each client holds, written into a folder of its own by whoever sets it up.

``holding.safetensors`` (labels, where the samples are in the whole data set, a mark of every
picture; written last, so it says that the rest is there), ``train-00000.safetensors`` and so on
(its own pictures) and ``test-00000.safetensors`` (the public test split). A client with such a
folder needs no data set; the server needs none with ``public.json``, which says how many classes
and test pictures there are. Pictures are read one by one, each checked by its mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.clients.data.pictures import ImageSet, Part, Remembered, packed, unpacked
from fedsim.clients.data.progress import bar
from fedsim.clients.shards import Holding, check_shards, images_of, shards_of, simulated_holding
from fedsim.core.errors import DamagedError, DataError
from fedsim.core.files import (
    UNFINISHED,
    named_in_utf8,
    read_json,
    read_tensors,
    save_tensors,
    write_json,
)
from fedsim.core.spec import DataSpec, Positive, Spec

HOLDING = "holding.safetensors"
PUBLIC = Path("server") / "public.json"
MOST_PICTURES, MOST_BYTES = 256, 32 << 20  # of a file with several pictures
_AGAIN = "deal it again with `fedsim deal`"


class _Terms(BaseModel):
    """What decides who holds which picture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: DataSpec
    seed: int

    def refuse_other(self, spec: Spec, where: Path) -> None:
        pairs: dict[str, tuple[Any, Any]] = {"seed": (self.seed, spec.seed)}
        for name in DataSpec.model_fields:
            pairs[f"data.{name}"] = getattr(self.data, name), getattr(spec.data, name)
        for name, (there, here) in pairs.items():
            if there != here:
                raise DataError(
                    f"'{where}' was dealt for another spec, whose {name} is {there} and not "
                    f"{here}; {_AGAIN}, or correct the spec."
                )


class _About(_Terms):
    """What a folder says beside labels and marks."""

    client: int
    classes: tuple[str, ...]
    pictures_a_file: Positive
    tested: bool  # whether the test split is there


class _Public(_Terms):
    """What a server without the data needs to know of it."""

    classes: Positive
    tested: Positive | None = None  # pictures in the test split, where clients evaluate


def deal(spec: Spec, folders: Sequence[Path]) -> None:
    """Write for every client what it holds, in the order of the clients.

    What is there already and fits is kept.
    """
    check_shards(spec)
    lacking = [n for n, folder in enumerate(folders) if not _is_dealt(folder, spec, n)]
    for client in lacking:
        _clear(folders[client])
    # From the source itself: each picture is read once, so a cache would be in vain.
    images, shards = images_of(spec.data, "train").source, shards_of(spec.data, spec.seed)
    test = images_of(spec.data, "test").source if lacking and spec.train.evaluate else None
    total = sum(len(shards[client]) for client in lacking) + len(test or ())
    with bar("dealing the pictures", total) as advance:
        contents = {
            client: _content(
                "train", Part(images, shards[client]), [folders[client]], spec, advance
            )
            for client in lacking
        }
        everyone = [folders[client] for client in lacking]
        public = _content("test", test, everyone, spec, advance) if test is not None else {}
    for client, content in contents.items():
        about = _About(
            data=spec.data,
            seed=spec.seed,
            client=client,
            classes=images.classes,
            pictures_a_file=_pictures_a_file(spec),
            tested=test is not None,
        )
        tensors = {
            "indices": torch.from_numpy(shards[client].astype(np.int64)),
            **content,
            **public,
        }
        words = {"about": about.model_dump_json()}
        save_tensors(folders[client] / HOLDING, tensors, words, mode=0o600)


def open_holding(folder: Path, spec: Spec, client: int) -> Holding:
    """What was dealt to a client, read picture by picture."""
    try:
        tensors, metadata = read_tensors(folder / HOLDING, links=True)
        about = _About.model_validate_json(metadata["about"])
        indices = tensors["indices"].numpy()
        parts = {
            split: _DealtImages(folder, split, tensors, about)
            for split in (("train", "test") if about.tested else ("train",))
        }
    except FileNotFoundError:
        raise DataError(
            f"'{folder}' holds no pictures of a client; deal them with `fedsim deal`."
        ) from None
    except (DamagedError, KeyError, ValidationError) as error:
        raise DataError(f"'{folder / HOLDING}' is damaged; {_AGAIN}.") from error
    about.refuse_other(spec, folder)
    if about.client != client:
        raise DataError(
            f"'{folder}' was dealt to client {about.client}, and this is client {client}; give "
            f"each node the folder of its own number."
        )

    def test() -> ImageSet:
        if "test" not in parts:
            raise DataError(
                f"'{folder}' was dealt without the test split, as train.evaluate was false; "
                f"{_AGAIN}."
            )
        return parts["test"]

    return Holding(indices, Remembered(parts["train"]), test)


def write_public(path: Path, spec: Spec) -> None:
    """For the server: how many classes there are, and how many pictures clients evaluate on. Not
    the names of the classes, which may be people's."""
    public = _Public(
        data=spec.data,
        seed=spec.seed,
        classes=len(images_of(spec.data, "train").classes),
        tested=len(images_of(spec.data, "test")) if spec.train.evaluate else None,
    )
    write_json(path, public.model_dump(mode="json"))


def read_public(path: Path, spec: Spec) -> int:
    """How many classes there are."""
    return _read_public(path, spec).classes


def read_tested(path: Path, spec: Spec) -> int | None:
    """How many pictures the test split has; None in a file from before, or where none is used."""
    return _read_public(path, spec).tested


def _read_public(path: Path, spec: Spec) -> _Public:
    try:
        public = _Public.model_validate(read_json(path, links=True))
    except FileNotFoundError:
        raise DataError(f"there is no '{path}'; `fedsim deal` writes it.") from None
    except (DamagedError, ValidationError) as error:
        raise DataError(f"'{path}' is damaged; {_AGAIN}.") from error
    public.refuse_other(spec, path)
    return public


class _DealtImages(ImageSet):
    """One split in a dealt folder."""

    def __init__(self, folder: Path, split: str, tensors: dict[str, Tensor], about: _About) -> None:
        self.classes, self.labels = about.classes, tensors[f"{split}_labels"].numpy()
        self._folder, self._split, self._each = folder, split, about.pictures_a_file
        self._marks = tensors[f"{split}_marks"].tolist()

    def image(self, index: int) -> Tensor:
        number, row = divmod(index, self._each)
        file = self._folder / _name(self._split, number)
        try:
            with named_in_utf8(file) as name, safe_open(name, framework="pt") as content:
                picture = content.get_slice("pictures")[row].contiguous()
        except FileNotFoundError:
            raise DataError(f"'{file}' is missing; {_AGAIN}.") from None
        except (SafetensorError, OSError, ValueError, IndexError) as error:
            raise DataError(f"'{file}' is damaged ({type(error).__name__}); {_AGAIN}.") from error
        if _mark(picture) != self._marks[index]:
            raise DataError(f"'{file}' is damaged, or another's; {_AGAIN}.")
        return unpacked(picture)


def _content(
    split: str,
    images: ImageSet,
    folders: Sequence[Path],
    spec: Spec,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Write the pictures of a split into each of the folders; their labels and marks."""
    marks: list[int] = []
    each = _pictures_a_file(spec)
    for number, first in enumerate(range(0, len(images), each)):
        rows = range(first, min(first + each, len(images)))
        pictures = [packed(images.image(row)) for row in rows]
        if any(picture.dtype != torch.uint8 for picture in pictures):
            pictures = [unpacked(picture) for picture in pictures]
        marks += [_mark(picture) for picture in pictures]
        stack = torch.stack(pictures)
        for folder in folders:
            save_tensors(folder / _name(split, number), {"pictures": stack}, mode=0o600)
        advance(len(rows))
    labels = torch.from_numpy(images.labels.astype(np.int64))
    return {f"{split}_labels": labels, f"{split}_marks": torch.tensor(marks, dtype=torch.int64)}


def _is_dealt(folder: Path, spec: Spec, client: int) -> bool:
    """Whether all is there and whole, and the data set has not changed since."""
    now = simulated_holding(spec, client)
    try:
        dealt = open_holding(folder, spec, client)
        pairs = [(dealt.own, now.own)]
        pairs += [(dealt.test(), now.test())] if spec.train.evaluate else []
        for images, _ in pairs:
            for row in range(len(images)):
                images.image(row)
    except DataError:  # of whatever kind: it is dealt anew
        return False
    return np.array_equal(dealt.indices, now.indices) and all(
        there.classes == here.classes and np.array_equal(there.labels, here.labels)
        for there, here in pairs
    )


def _clear(folder: Path) -> None:
    """An empty folder for its owner alone; what others wrote there is never deleted."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"'{folder}' is a file, not a directory; choose another.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    patterns = (HOLDING, "train-*.safetensors", "test-*.safetensors", f"*{UNFINISHED}")
    dealt = {path for pattern in patterns for path in folder.glob(pattern)}
    if set(folder.iterdir()) - dealt:
        raise DataError(f"'{folder}' holds something else than dealt pictures; choose another.")
    for path in sorted(dealt, key=lambda path: path.name != HOLDING):  # it says that all is there
        path.unlink()


def _pictures_a_file(spec: Spec) -> int:
    return max(1, min(MOST_PICTURES, MOST_BYTES // (3 * spec.data.image_size**2)))


def _name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.safetensors"


def _mark(picture: Tensor) -> int:
    """XXH3 of the picture's bytes, as a signed number."""
    digest = xxhash.xxh3_64_digest(picture.contiguous().view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest, "big", signed=True)
