"""ImageNet's layouts: by synset id, flat with the devkit, Kaggle's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedsim.clients.data.imagenet import TRUTH
from fedsim.core.errors import DataError
from tests.clients.data.conftest import SHARED
from tests.layouts import load, names_of, save_picture

WNIDS = ["n02123045", "n01440764", "n03594945"]  # the devkit's order is not the sorted one
SORTED = ("n01440764", "n02123045", "n03594945")
TRUTHS = [3, 1, 2, 1, 3, 2]  # ILSVRC2012_IDs, from 1, into WNIDS


@pytest.fixture
def train(tmp_path: Path) -> Path:
    root = tmp_path / "imagenet"
    for c, wnid in enumerate(WNIDS):
        for i in range(4):
            save_picture(root / "train" / wnid / f"{wnid}_{i}.JPEG", 10 * c + i)
    return root


def _flat_val(folder: Path) -> None:
    for number in range(1, len(TRUTHS) + 1):
        save_picture(folder / f"ILSVRC2012_val_{number:08}.JPEG", 100 + number)


def _devkit(root: Path) -> Path:
    """Three classes, and a synset above them that is no class."""
    data = root / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    (data / TRUTH).write_text("".join(f"{number}\n" for number in TRUTHS))
    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("num_children", "f8")]
    rows = [(number + 1, wnid, "words", 0) for number, wnid in enumerate(WNIDS)]
    synsets = np.array([*rows, (4, "n00001740", "entity", 3)], dtype=kinds)
    savemat(data / "meta.mat", {"synsets": synsets.reshape(-1, 1)})
    return data


def _kaggle(root: Path) -> None:
    inner = root / "ILSVRC" / "Data" / "CLS-LOC"
    for c, wnid in enumerate(WNIDS):
        save_picture(inner / "train" / wnid / f"{wnid}_1.JPEG", c)
    _flat_val(inner / "val")
    save_picture(inner / "test" / "ILSVRC2012_test_00000001.JPEG", 99)
    rows = [
        f"ILSVRC2012_val_{n:08},{WNIDS[t - 1]} 1 2 30 40 {WNIDS[t - 1]} 5 6 7 8 "
        for n, t in enumerate(TRUTHS, start=1)
    ]
    (root / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows[::-1]]))
    (root / "LOC_synset_mapping.txt").write_text("".join(f"{w} thing, stuff\n" for w in SORTED))


def _truths() -> list[int]:
    return [SORTED.index(WNIDS[truth - 1]) for truth in TRUTHS]


def test_train_and_val_by_synset_id_are_the_splits(train: Path) -> None:
    for c, wnid in enumerate(WNIDS):
        save_picture(train / "val" / wnid / f"ILSVRC2012_val_{c + 1:08}.JPEG", c)
    save_picture(train / "test" / "test" / "ILSVRC2012_test_00000001.JPEG", 7)
    images, held_out = load("imagenet", train), load("imagenet", train, "test")
    assert images.classes == held_out.classes == SORTED
    assert images.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert names_of(images)[4] == "train/n02123045/n02123045_0.JPEG"
    assert held_out.labels.tolist() == [0, 1, 2]
    assert held_out.image(0).shape == (3, 16, 16)


def test_a_flat_val_is_labelled_by_the_devkit(train: Path) -> None:
    _flat_val(train / "val")
    _devkit(train)
    images, held_out = load("imagenet", train), load("imagenet", train, "test")
    assert images.classes == held_out.classes == SORTED
    assert len(images) == 12
    assert held_out.labels.tolist() == _truths()


@pytest.mark.parametrize("given", ["", "ILSVRC", "ILSVRC/Data/CLS-LOC"])
def test_kaggle_s_archive_is_read_from_any_of_its_levels(tmp_path: Path, given: str) -> None:
    _kaggle(tmp_path / "kaggle")
    images = load("imagenet", tmp_path / "kaggle" / given)
    held_out = load("imagenet", tmp_path / "kaggle" / given, "test")
    assert images.classes == held_out.classes == SORTED
    assert images.labels.tolist() == [0, 1, 2]
    assert held_out.labels.tolist() == _truths()


def test_of_a_flat_val_only_the_classes_of_train_count(train: Path) -> None:
    _flat_val(train / "val")
    _devkit(train)
    for file in (train / "train" / "n02123045").iterdir():
        file.unlink()
    images = load("imagenet", train, "test")
    assert images.classes == ("n01440764", "n03594945")
    assert images.labels.tolist() == [1, 0, 1, 0]
    assert names_of(images)[0].endswith("_00000001.JPEG")
    assert names_of(images)[1].endswith("_00000003.JPEG")


def test_a_flat_val_alone_is_divided(tmp_path: Path) -> None:
    _flat_val(tmp_path / "val")
    _devkit(tmp_path)
    images, held_out = load("imagenet", tmp_path), load("imagenet", tmp_path, "test")
    assert images.classes == SORTED
    assert len(images) + len(held_out) == 6
    assert not set(names_of(images)) & set(names_of(held_out))


def test_folders_by_synset_id_alone_are_split_as_any_tree(train: Path) -> None:
    alone, tree = load("imagenet", train / "train"), load("imagefolder", train / "train")
    assert alone.classes == SORTED
    assert names_of(alone) == names_of(tree)
    assert 0 < len(load("imagenet", train / "train", "test")) < len(alone)


def test_a_damaged_picture_of_val_is_left_out_and_named(train: Path) -> None:
    _flat_val(train / "val")
    _devkit(train)
    (train / "val" / "ILSVRC2012_val_00000002.JPEG").write_bytes(b"\xff\xd8\xff")
    images = load("imagenet", train, "test")
    assert images.skipped == ("val/ILSVRC2012_val_00000002.JPEG",)
    assert images.labels.tolist() == [_truths()[0], *_truths()[2:]]
    assert load("imagenet", train).skipped == ()


def test_what_is_missing_is_named(train: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.path is needed for imagenet"):
        load("imagenet", None)
    with pytest.raises(DataError, match="does not exist"):
        load("imagenet", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures in folders by synset id"):
        load("imagenet", tmp_path / "empty")
    _flat_val(train / "val")
    with pytest.raises(DataError, match=r"val/ is flat and .* has neither .*ground_truth\.txt nor"):
        load("imagenet", train)
    data = _devkit(train)
    (data / "meta.mat").unlink()
    with pytest.raises(DataError, match=r"meta\.mat is missing"):
        load("imagenet", train)
    (data / "meta.mat").write_bytes(b"no matrix at all")
    with pytest.raises(DataError, match=r"meta\.mat does not hold the synsets"):
        load("imagenet", train)
    savemat(data / "meta.mat", {"other": 1})
    with pytest.raises(DataError, match=r"meta\.mat does not hold the synsets"):
        load("imagenet", train)


def test_a_ground_truth_that_does_not_fit_is_told(train: Path) -> None:
    _flat_val(train / "val")
    truth = _devkit(train) / TRUTH
    truth.write_text("3\n1\n2\n")
    with pytest.raises(DataError, match=r"has 3 lines, so it cannot tell the class of val/\S+4\."):
        load("imagenet", train)
    truth.write_text("3\n1\n4\n1\n3\n2\n")  # 4 is the synset above the others
    with pytest.raises(DataError, match="the class 4 in line 3, which is none of the 3 classes"):
        load("imagenet", train)
    truth.write_text("cat\n")
    with pytest.raises(DataError, match="no list of numbers"):
        load("imagenet", train)
    truth.write_text("".join(f"{number}\n" for number in TRUTHS))
    save_picture(train / "val" / "mine.JPEG", 0)
    with pytest.raises(DataError, match=r"val/mine\.JPEG is not named like"):
        load("imagenet", train)


def test_a_solution_that_lacks_a_picture_is_told(tmp_path: Path) -> None:
    _kaggle(tmp_path)
    save_picture(tmp_path / "ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000009.JPEG", 1)
    with pytest.raises(DataError, match=r"does not tell the class of val/\S+9\.JPEG"):
        load("imagenet", tmp_path)


def test_other_trees_are_sent_to_imagefolder(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save_picture(tmp_path / name / "1.jpg", 1)
    with pytest.raises(DataError, match=r"'cat' of .* is no synset id .*data\.name=imagefolder"):
        load("imagenet", tmp_path)


def test_imagenet_with_one_picture_a_class_is_split() -> None:
    if not (SHARED / "imagenet").is_dir():
        pytest.skip("the shared ImageNet pictures are not here")
    train = load("imagefolder", SHARED / "imagenet", image_size=64)
    test = load("imagefolder", SHARED / "imagenet", "test", image_size=64)
    assert len(train) + len(test) == 200
    assert len(train.classes) == 200
    assert 20 <= len(test) <= 60
    assert train.skipped == test.skipped == ()
    assert test.image(0).shape == (3, 64, 64)
