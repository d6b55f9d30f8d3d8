"""CelebA's official files: aligned faces, 40 attributes, identities and the evaluation split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedsim.clients.data.folders import Placement, TreeImages, choose
from fedsim.clients.data.pictures import Split, path_of
from fedsim.clients.data.trees import FolderTree, Tree, ZipTree
from fedsim.core.errors import DataError, did_you_mean
from fedsim.core.spec import DataSpec

PICTURES = "img_align_celeba"
ATTRIBUTES = "list_attr_celeba.txt"
_IDENTITIES = "identity_CelebA.txt"
SPLITS = "list_eval_partition.txt"
FOLDERS = ("", "Img", "Anno", "Eval")  # as the official archive has them
_DEFAULT_LABEL = "Smiling"  # of the 40 the one nearest to half and half


def load_celeba(data: DataSpec, split: Split) -> TreeImages:
    """One split, labelled by an attribute or, with ``data.label`` identity, by person.

    By attribute the official evaluation split holds: 0 is for train, 1 (validation) and 2 are for
    test. It keeps people apart, so by identity no one would be in both: then it is not used, and a
    fifth of the pictures by a hash of their names is for test. Whose picture each is makes the
    groups of a natural partition.
    """
    path = path_of(data, "the folder of img_align_celeba and its lists")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"data.path '{path}' is no folder; give the one with CelebA's files.")
    root, label = root.resolve(), data.label or _DEFAULT_LABEL
    tree = _pictures(root)
    listing = tree.listing()
    if not len(listing):
        raise DataError(f"{tree.where} holds no pictures; get CelebA's pictures anew.")
    files = [name.rpartition("/")[2] for name in listing.names]
    if label == "identity":
        people = _identities(_find(root, _IDENTITIES), files)
        ids, labels = np.unique(people, return_inverse=True)
        placement = Placement(labels, tuple(str(i) for i in ids), groups=people)
        return choose(tree, listing, placement, split, data.image_size)

    labels = _attribute(_find(root, ATTRIBUTES), label, files)
    parts = _lookup(_find(root, SPLITS), files, _number)
    if not set(np.unique(parts)) <= {0, 1, 2}:
        raise DataError(f"{_find(root, SPLITS)} has splits other than 0, 1 and 2; get it anew.")
    known = _find(root, _IDENTITIES, needed=False)
    groups = _identities(known, files) if known.is_file() else None
    placement = Placement(labels, (f"not_{label}", label), parts > 0, groups)
    return choose(tree, listing, placement, split, data.image_size)


def _pictures(root: Path) -> Tree:
    for folder in FOLDERS:
        if (root / folder / PICTURES).is_dir():
            return FolderTree(root / folder / PICTURES)
    for folder in FOLDERS:
        if (root / folder / f"{PICTURES}.zip").is_file():
            return ZipTree([root / folder / f"{PICTURES}.zip"])
    raise DataError(
        f"{root} has neither {PICTURES}/ nor {PICTURES}.zip (nor has its Img/); put CelebA's "
        "aligned pictures there."
    )


def _find(root: Path, name: str, needed: bool = True) -> Path:
    for folder in FOLDERS:
        if (root / folder / name).is_file():
            return root / folder / name
    if needed:
        raise DataError(f"{root} has no {name} (nor has its Anno/ or Eval/); put it there.")
    return root / name


def _attribute(file: Path, label: str, pictures: list[str]) -> np.ndarray:
    """The count, the names of the attributes, then a picture and -1 or 1 for each of them."""
    lines = _lines(file)
    if len(lines) < 2 or not lines[0].strip().isdigit():
        raise DataError(f"{file} does not begin with its count and attributes; get it anew.")
    names = lines[1].split()
    if int(lines[0]) != len(lines) - 2:
        raise DataError(
            f"{file} announces {int(lines[0])} pictures but lists {len(lines) - 2}; get it anew."
        )
    if label not in names:
        raise DataError(
            f"celeba has no attribute '{label}'{did_you_mean(label, [*names, 'identity'])}; "
            f"data.label is identity or one of: {', '.join(names)}."
        )
    at = names.index(label)

    def value(words: list[str]) -> int:
        if len(words) != len(names) or words[at] not in ("-1", "1"):
            raise ValueError("not one of -1 and 1 for each attribute")
        return int(words[at] == "1")

    return _lookup(file, pictures, value, lines[2:])


def _identities(file: Path, pictures: list[str]) -> np.ndarray:
    return _lookup(file, pictures, _number)


def _number(words: list[str]) -> int:
    (word,) = words
    return int(word)


def _lookup(
    file: Path,
    pictures: list[str],
    value: Callable[[list[str]], int],
    lines: list[str] | None = None,
) -> np.ndarray:
    """What ``file`` says of each picture: lines of a file name and what ``value`` reads."""
    values: dict[str, int] = {}
    for line in _lines(file) if lines is None else lines:
        name, *words = line.split()
        try:
            values[name] = value(words)
        except ValueError as error:
            raise DataError(f"{file} has a damaged line for '{name}'; get it anew.") from error
    for picture in pictures:
        if picture not in values:
            raise DataError(
                f"{file} does not list the picture {picture}; get it anew or remove the picture."
            )
    return np.array([values[picture] for picture in pictures], dtype=np.int64)


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text ({error}); get it anew.") from error
    return [line for line in text.splitlines() if line.strip()]
