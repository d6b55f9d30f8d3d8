"""Trees of pictures: split without overlap, classes by their folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from fedsim.core.errors import DataError
from tests.clients.data.conftest import photo_tree, truncate
from tests.layouts import load, names_of, save_picture


def test_a_tree_is_split_without_overlap_and_the_same_every_time(tree: Path) -> None:
    train, test = load("imagefolder", tree), load("imagefolder", tree, "test")
    assert len(train) + len(test) == 24
    assert not set(names_of(train)) & set(names_of(test))
    assert set(train.labels) == {0, 1, 2}
    assert train.classes == test.classes == ("bird", "cat", "dog")
    assert names_of(load("imagefolder", tree)) == names_of(train)


def test_the_split_does_not_depend_on_where_the_tree_lies(tree: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tree, tmp_path / "elsewhere")
    here, there = (names_of(load("imagefolder", root, "test")) for root in (tree, copy))
    assert set(here) == set(there)


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_classes_of_one_picture_still_give_both_splits(
    tmp_path: Path, photo: Image.Image, count: int
) -> None:
    root = photo_tree(tmp_path / "single", photo, [f"c{i:02}" for i in range(count)], 1)
    train, test = load("imagefolder", root), load("imagefolder", root, "test")
    assert len(train) >= 1
    assert len(test) >= 1
    assert len(train) + len(test) == count
    assert len(train.classes) == count


def test_one_picture_is_for_training_and_the_missing_test_is_told(
    tmp_path: Path, photo: Image.Image
) -> None:
    root = photo_tree(tmp_path / "one", photo, ["me"], 1)
    assert len(load("imagefolder", root)) == 1
    with pytest.raises(DataError, match="no whole picture for test"):
        load("imagefolder", root, "test")


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_split_folders_are_honoured(tmp_path: Path, photo: Image.Image, held_out: str) -> None:
    root = tmp_path / "splits"
    photo_tree(root / "train", photo, ["a", "b"], 3)
    photo_tree(root / held_out, photo, ["b", "c"], 2)
    train, test = load("imagefolder", root), load("imagefolder", root, "test")
    assert train.classes == test.classes == ("a", "b", "c")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert test.labels.tolist() == [1, 1, 2, 2]


def test_a_lone_split_folder_is_divided(tmp_path: Path, photo: Image.Image) -> None:
    photo_tree(tmp_path / "lone" / "train", photo, ["a", "b"], 8)
    train, test = (load("imagefolder", tmp_path / "lone", split) for split in ("train", "test"))
    assert train.classes == ("a", "b")
    assert len(train) > len(test) > 0


def test_a_test_folder_without_classes_leaves_val_for_test(
    tmp_path: Path, photo: Image.Image
) -> None:
    root = tmp_path / "imagenet"
    photo_tree(root / "train", photo, ["a", "b"], 2)
    photo_tree(root / "val", photo, ["a", "b"], 1)
    photo_tree(root, photo, ["test"], 4)
    found = names_of(load("imagefolder", root, "test"))
    assert set(found) == {"val/a/0000.jpg", "val/b/0000.jpg"}


def test_nested_folders_belong_to_their_first_level(tmp_path: Path, photo: Image.Image) -> None:
    root = tmp_path / "nested"
    photo_tree(root / "cat", photo, ["indoor", "outdoor"], 3)
    photo_tree(root / "dog" / "puppy", photo, ["small"], 3)
    assert load("imagefolder", root).classes == ("cat", "dog")


def test_links_are_followed_once(tree: Path, photo: Image.Image, tmp_path: Path) -> None:
    far = photo_tree(tmp_path / "far", photo, ["fox"], 5)
    (tree / "fox").symlink_to(far / "fox", target_is_directory=True)
    (far / "fox" / "loop").symlink_to(far / "fox", target_is_directory=True)
    train, test = load("imagefolder", tree), load("imagefolder", tree, "test")
    assert train.classes == ("bird", "cat", "dog", "fox")
    assert len(train) + len(test) == 29


def test_mistakes_with_the_path_are_one_sentence(
    tmp_path: Path, photo: Image.Image, tree: Path
) -> None:
    with pytest.raises(DataError, match=r"^data\.path is needed for imagefolder"):
        load("imagefolder")
    with pytest.raises(DataError, match="does not exist"):
        load("imagefolder", tmp_path / "nowhere")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no pictures"):
        load("imagefolder", tmp_path / "empty")
    with pytest.raises(DataError, match="in no class folder"):
        load("imagefolder", tree / "cat")
    with pytest.raises(DataError, match="neither a folder nor a zip"):
        load("imagefolder", tree / "cat" / "0000.jpg")
    for file in tree.rglob("*.jpg"):
        truncate(file)
    with pytest.raises(DataError, match=r"all 24 pictures of .* are damaged"):
        load("imagefolder", tree)


def test_a_person_s_folder_below_the_class_makes_groups(tmp_path: Path) -> None:
    for smile in ("smiling", "not"):
        for p, person in enumerate(("anna", "ben", "carl")):
            for i in range(2):
                save_picture(tmp_path / "faces" / smile / person / f"{i}.png", 2 * p + i)
    images = load("imagefolder", tmp_path / "faces")
    assert images.classes == ("not", "smiling")
    people = ["anna", "ben", "carl"]
    assert images.groups is not None
    assert [people[g] for g in images.groups] == [n.split("/")[1] for n in names_of(images)]
    Image.new("RGB", (8, 8)).save(tmp_path / "faces" / "not" / "nobody.png")
    assert load("imagefolder", tmp_path / "faces").groups is None
