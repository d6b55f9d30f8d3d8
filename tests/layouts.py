"""Data sets of a few pictures in their official layouts, made on the spot."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedsim.clients.data.datasets import ImageSet, load_images
from fedsim.core.spec import DataSpec

ATTRIBUTES = ("Bald", "Smiling", "Young")


def load(name: str, path: Path | None = None, split: Any = "train", **more: Any) -> ImageSet:
    where = str(path) if path else None
    return load_images(DataSpec(name=name, path=where, **{"image_size": 16, **more}), split)


def save_picture(file: Path, seed: int, side: int = 16) -> Path:
    """A picture of its own for each seed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(colours).resize((side, side)).save(file)
    return file


def make_tree(root: Path, classes: int = 3, each: int = 16) -> Path:
    """A tree class/person/picture of eight people."""
    for number in range(classes * each):
        person = f"person-{number % 8}"
        save_picture(root / f"class-{number % classes}" / person / f"{number:03}.png", number, 24)
    return root


def names_of(images: ImageSet) -> list[str]:
    return list(images._names)  # type: ignore[attr-defined]


class Celeba:
    """CelebA with ``people`` of ``each`` pictures; every third person is for test.

    Of each person the pictures smile in turn; the first two people of test are one for
    validation and one for test.
    """

    def __init__(
        self, root: Path, people: int = 9, each: int = 4, *, archive: bool = False
    ) -> None:
        self.root = root
        anno, eval_, img = (root / f for f in ("Anno", "Eval", "Img")) if archive else [root] * 3
        for folder in (anno, eval_, img):
            folder.mkdir(parents=True, exist_ok=True)
        self.attributes, self.identities = (
            anno / "list_attr_celeba.txt",
            anno / "identity_CelebA.txt",
        )
        self.splits, self.pictures = eval_ / "list_eval_partition.txt", img / "img_align_celeba"
        self.files = [f"{n + 1:06}.jpg" for n in range(people * each)]
        self.person = {f: 100 - n // each for n, f in enumerate(self.files)}
        self.smiles = {f: n % 2 for n, f in enumerate(self.files)}
        part = {f: (0, 0, 1 + n // each % 2)[n // each % 3] for n, f in enumerate(self.files)}
        self.part = part
        for n, file in enumerate(self.files):
            save_picture(self.pictures / file, n)
        rows = [f"{f}  1 {'-1' if not self.smiles[f] else ' 1'} -1" for f in self.files]
        self._write(self.attributes, [str(len(rows)), " ".join(ATTRIBUTES) + " ", *rows])
        self._write(self.identities, [f"{f} {self.person[f]}" for f in self.files])
        self._write(self.splits, [f"{f} {part[f]}" for f in self.files])

    @staticmethod
    def _write(file: Path, lines: list[str]) -> None:
        file.write_text("".join(f"{line}\n" for line in lines))

    def zip_pictures(self) -> None:
        with zipfile.ZipFile(self.pictures.with_suffix(".zip"), "w") as archive:
            for file in sorted(self.pictures.iterdir()):
                archive.write(file, f"img_align_celeba/{file.name}")
                file.unlink()
        self.pictures.rmdir()
