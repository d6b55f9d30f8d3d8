"""ImageNet's layouts: folders by synset id, the flat val/ with its devkit, Kaggle's archive."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedsim.clients.data.folders import Placement, TreeImages, choose, place_by_folder
from fedsim.clients.data.listing import Listing
from fedsim.clients.data.pictures import Split, path_of
from fedsim.clients.data.trees import open_tree
from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec

WNID = re.compile(r"n\d{8}")
_VAL = re.compile(r"ILSVRC2012_val_(\d{8})\.jpeg", re.IGNORECASE)
_BASES = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")  # where Kaggle's archive keeps train/ and val/
_DEVKIT = "ILSVRC2012_devkit_t12/data"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_SOLUTION = "LOC_val_solution.csv"


def load_imagenet(data: DataSpec, split: Split) -> TreeImages:
    """One split: ``train/`` is for train and ``val/`` for test.

    Classes are the synset ids on disk, sorted: with all 1000 of them the order of torchvision's and
    timm's models. Without splits it is as with any tree. ``val/`` may be flat: then Kaggle's
    solution or the devkit, which lie beside it, tell its labels.
    """
    where = path_of(data, "the folder above train/ and val/, or of folders by synset id")
    root = Path(where).expanduser()
    base = next((root / inner for inner in _BASES if (root / inner).is_dir()), root)
    tree = open_tree(str(base))
    listing = tree.listing()
    if "val" in listing.folders:
        # Given any level of Kaggle's archive, its tables lie at the top.
        places = (root.resolve(), *root.resolve().parents[:3])
        placement = _with_flat_val(listing, places)
    else:
        placement = place_by_folder(listing, held_out=("val", "test"))
        if not placement.classes:
            raise DataError(
                f"{tree.where} holds no pictures in folders by synset id; give the folder "
                "above train/ and val/."
            )
    _check_wnids(placement.classes, tree.where)
    return choose(tree, listing, placement, split, data.image_size)


def _with_flat_val(listing: Listing, places: Iterable[Path]) -> Placement:
    """Folders by synset id under ``train/`` (and ``val/``), and pictures in ``val/`` itself."""
    paths = [folder.split("/") for folder in listing.folders]
    known = [p[1] if len(p) > 1 and p[0] in ("train", "val") else "" for p in paths]
    flat = listing.folders.index("val")
    rows = np.flatnonzero(listing.folder_of == flat)
    val = _val_labels([name.rpartition("/")[2] for name in listing.names.take(rows)], places)
    # Where only some classes were taken for train, val/ still has them all: those count.
    trained = {p[1] for p in paths if p[0] == "train" and len(p) > 1}
    classes = sorted(trained or {*val, *(name for name in known if name)})
    number = {name: label for label, name in enumerate(classes)}
    labels = np.array([number.get(name, -1) for name in known], dtype=np.int64)[listing.folder_of]
    labels[rows] = [number.get(name, -1) for name in val]
    test = np.array([p[0] == "val" for p in paths])[listing.folder_of]
    return Placement(labels, tuple(classes), test if trained else None)


def _val_labels(pictures: list[str], places: Iterable[Path]) -> list[str]:
    """The synset id of each picture of a flat ``val/``."""
    places = tuple(places)
    for place in places:
        if (place / _SOLUTION).is_file():
            return _by_solution(pictures, place / _SOLUTION)
        for devkit in (place / _DEVKIT, place):
            if (devkit / TRUTH).is_file():
                return _by_devkit(pictures, devkit)
    raise DataError(
        f"val/ is flat and {places[0]} has neither {_DEVKIT}/{TRUTH} nor {_SOLUTION} to tell its "
        "classes; add one of them, or move the pictures to folders by synset id."
    )


def _by_solution(pictures: list[str], file: Path) -> list[str]:
    """Kaggle's table: ``ILSVRC2012_val_00000001,n01751748 111 108 260 170 ...``."""
    try:
        with open(file, newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream) if len(row) > 1]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a table ({error}); get it anew.") from error
    wnids = {row[0].lower(): row[1].split(" ")[0] for row in rows[1:]}
    labels = []
    for picture in pictures:
        wnid = wnids.get(picture.rpartition(".")[0].lower(), "")
        if not WNID.fullmatch(wnid):
            raise DataError(f"{file} does not tell the class of val/{picture}; get it anew.")
        labels.append(wnid)
    return labels


def _by_devkit(pictures: list[str], devkit: Path) -> list[str]:
    """The n-th line of the ground truth is the id of picture n's synset, which meta.mat names."""
    wnids = _synsets(devkit / "meta.mat")
    truth = devkit / TRUTH
    try:
        numbers = [int(line) for line in truth.read_text(encoding="ascii").split()]
    except (OSError, ValueError) as error:
        raise DataError(f"{truth} is no list of numbers ({error}); get the devkit anew.") from error
    labels = []
    for picture in pictures:
        match = _VAL.fullmatch(picture)
        if match is None:
            raise DataError(
                f"val/{picture} is not named like ILSVRC2012_val_00000001.JPEG, so its class "
                "cannot be looked up; give it its own name back or remove it."
            )
        line = int(match[1])
        if not 1 <= line <= len(numbers):
            raise DataError(
                f"{truth} has {len(numbers)} lines, so it cannot tell the class of "
                f"val/{picture}; get the devkit anew."
            )
        if numbers[line - 1] not in wnids:
            raise DataError(
                f"{truth} names the class {numbers[line - 1]} in line {line}, which is none of the "
                f"{len(wnids)} classes of meta.mat; get the devkit anew."
            )
        labels.append(wnids[numbers[line - 1]])
    return labels


def _synsets(file: Path) -> dict[int, str]:
    """``ILSVRC2012_ID`` to ``WNID``, of the leaves: the synsets above them are no classes."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    if not file.is_file():
        raise DataError(f"{file} is missing; get the devkit anew.")
    try:
        synsets = np.atleast_1d(loadmat(str(file), squeeze_me=True)["synsets"])
        leaves = [synset for synset in synsets if int(synset["num_children"]) == 0]
        return {int(leaf["ILSVRC2012_ID"]): str(leaf["WNID"]) for leaf in leaves}
    except (MatReadError, OSError, KeyError, IndexError, ValueError, TypeError) as error:
        raise DataError(f"{file} does not hold the synsets; get the devkit anew.") from error


def _check_wnids(classes: Iterable[str], where: str) -> None:
    for name in classes:
        if not WNID.fullmatch(name):
            raise DataError(
                f"the class folder '{name}' of {where} is no synset id like n01440764; "
                "use data.name=imagefolder for other trees."
            )
