"""Data sets: what is embedded, trees of pictures with damage in them, CIFAR-10 as it is found."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.clients.data import broken
from fedsim.clients.data.cifar import CLASSES as CIFAR_CLASSES
from fedsim.clients.data.datasets import ImageSet, dataset_names, load_images
from fedsim.clients.data.photos import PICTURES, crop_boxes
from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec
from fedsim.tools.inventory import INVENTORY

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSIM_CACHE", str(folder))
    return folder


@pytest.fixture
def photo() -> Image.Image:
    return _to_pil(load_images(DataSpec(image_size=64), "train").image(0))


@pytest.fixture
def tree(tmp_path: Path, photo: Image.Image) -> Path:
    """Three classes of eight pictures."""
    return _make_tree(tmp_path / "tree", photo, ["bird", "cat", "dog"], 8)


def _load(name: str, path: Path | None = None, split: Any = "train", size: int = 16) -> ImageSet:
    data = DataSpec(name=name, path=str(path) if path else None, image_size=size)
    return load_images(data, split)


def _to_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def _make_tree(root: Path, photo: Image.Image, classes: list[str], each: int) -> Path:
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(each):
            photo.rotate(20 * (each * c + i)).save(root / name / f"{i:04}.jpg")
    return root


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _zip_folder(folder: Path, target: Path, under: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted(folder.rglob("*.jpg")):
            archive.write(file, under + file.relative_to(folder).as_posix())
    return target


def _names(images: ImageSet) -> set[str]:
    return set(images._names)  # type: ignore[attr-defined]


# What is embedded


@pytest.mark.parametrize("name", ["photos", "lfw_subset"])
@pytest.mark.parametrize("size", [8, 33])
def test_an_image_has_three_channels_in_the_unit_range_at_any_size(name: str, size: int) -> None:
    images = _load(name, size=size)
    image = images.image(len(images) - 1)
    assert image.shape == (3, size, size)
    assert image.dtype == torch.float32
    assert image.min() >= 0
    assert image.max() <= 1
    assert image.std() > 0.01
    assert images.labels.dtype == np.int64
    assert images.skipped == ()


def test_photos_has_the_same_number_of_crops_of_every_picture() -> None:
    train, test = _load("photos"), _load("photos", split="test")
    assert np.bincount(train.labels).tolist() == [64] * 8
    assert np.bincount(test.labels).tolist() == [16] * 8
    assert train.classes == test.classes == tuple(PICTURES)


@pytest.mark.parametrize("picture", PICTURES)
def test_train_and_test_crops_share_no_pixel(picture: str) -> None:
    for left, top, right, bottom in crop_boxes(picture, "train"):
        assert right - left == bottom - top
        for other in crop_boxes(picture, "test"):
            apart_in_x = right <= other[0] or other[2] <= left
            apart_in_y = bottom <= other[1] or other[3] <= top
            assert apart_in_x or apart_in_y


def test_crops_are_at_least_half_of_the_region_and_differ() -> None:
    boxes = crop_boxes("astronaut", "train")  # 512 x 512: the region is 358 wide
    sides = [right - left for left, _, right, _ in boxes]
    assert min(sides) >= 179
    assert max(sides) <= 358
    assert len(set(boxes)) == len(boxes)


def test_lfw_subset_is_split_by_class_and_grey() -> None:
    train, test = _load("lfw_subset"), _load("lfw_subset", split="test")
    assert np.bincount(train.labels).tolist() == [80, 80]
    assert np.bincount(test.labels).tolist() == [20, 20]
    assert train.classes == ("face", "not_face")
    image = train.image(3)
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])


def test_an_unknown_name_tells_the_nearest_and_all_known() -> None:
    with pytest.raises(DataError, match=r"did you mean 'photos'.*cifar10, cifar100"):
        _load("photo")
    embedded, on_disk = {"lfw_subset", "photos"}, {"imagefolder", "imagenet", "celeba", "mnist"}
    assert {*dataset_names()} == embedded | on_disk | {"cifar10", "cifar100", "hf:<name>"}


def test_every_data_set_is_listed_with_what_it_is() -> None:
    listed = INVENTORY["data"]()
    assert list(listed) == dataset_names()
    assert all(listed.values())


# Trees


def test_a_tree_is_split_without_overlap_and_the_same_every_time(tree: Path) -> None:
    train, test = _load("imagefolder", tree), _load("imagefolder", tree, "test")
    assert len(train) + len(test) == 24
    assert not _names(train) & _names(test)
    assert set(train.labels) == {0, 1, 2}
    assert train.classes == test.classes == ("bird", "cat", "dog")
    assert _names(_load("imagefolder", tree)) == _names(train)


def test_the_split_does_not_depend_on_where_the_tree_lies(tree: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tree, tmp_path / "elsewhere")
    assert _names(_load("imagefolder", tree, "test")) == _names(_load("imagefolder", copy, "test"))


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_classes_of_one_picture_still_give_both_splits(
    tmp_path: Path, photo: Image.Image, count: int
) -> None:
    root = _make_tree(tmp_path / "single", photo, [f"c{i:02}" for i in range(count)], 1)
    train, test = _load("imagefolder", root), _load("imagefolder", root, "test")
    assert len(train) >= 1
    assert len(test) >= 1
    assert len(train) + len(test) == count
    assert len(train.classes) == count


def test_one_picture_is_for_training_and_the_missing_test_is_told(
    tmp_path: Path, photo: Image.Image
) -> None:
    root = _make_tree(tmp_path / "one", photo, ["me"], 1)
    assert len(_load("imagefolder", root)) == 1
    with pytest.raises(DataError, match="no whole picture for test"):
        _load("imagefolder", root, "test")


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_split_folders_are_honoured(tmp_path: Path, photo: Image.Image, held_out: str) -> None:
    root = tmp_path / "splits"
    _make_tree(root / "train", photo, ["a", "b"], 3)
    _make_tree(root / held_out, photo, ["b", "c"], 2)
    train, test = _load("imagefolder", root), _load("imagefolder", root, "test")
    assert train.classes == test.classes == ("a", "b", "c")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert test.labels.tolist() == [1, 1, 2, 2]


def test_a_lone_split_folder_is_divided(tmp_path: Path, photo: Image.Image) -> None:
    _make_tree(tmp_path / "lone" / "train", photo, ["a", "b"], 8)
    train, test = (_load("imagefolder", tmp_path / "lone", split) for split in ("train", "test"))
    assert train.classes == ("a", "b")
    assert len(train) > len(test) > 0


def test_a_test_folder_without_classes_leaves_val_for_test(
    tmp_path: Path, photo: Image.Image
) -> None:
    root = tmp_path / "imagenet"
    _make_tree(root / "train", photo, ["a", "b"], 2)
    _make_tree(root / "val", photo, ["a", "b"], 1)
    _make_tree(root, photo, ["test"], 4)
    assert _names(_load("imagefolder", root, "test")) == {"val/a/0000.jpg", "val/b/0000.jpg"}


def test_nested_folders_belong_to_their_first_level(tmp_path: Path, photo: Image.Image) -> None:
    root = tmp_path / "nested"
    _make_tree(root / "cat", photo, ["indoor", "outdoor"], 3)
    _make_tree(root / "dog" / "puppy", photo, ["small"], 3)
    assert _load("imagefolder", root).classes == ("cat", "dog")


def test_links_are_followed_once(tree: Path, photo: Image.Image, tmp_path: Path) -> None:
    far = _make_tree(tmp_path / "far", photo, ["fox"], 5)
    (tree / "fox").symlink_to(far / "fox", target_is_directory=True)
    (far / "fox" / "loop").symlink_to(far / "fox", target_is_directory=True)
    train, test = _load("imagefolder", tree), _load("imagefolder", tree, "test")
    assert train.classes == ("bird", "cat", "dog", "fox")
    assert len(train) + len(test) == 29


def test_a_wide_picture_gives_its_centre_square(tmp_path: Path) -> None:
    stripes = np.zeros((40, 120, 3), dtype=np.uint8)
    stripes[:, 40:80] = (255, 0, 0)
    for name in ("a", "b"):
        (tmp_path / "wide" / name).mkdir(parents=True)
        Image.fromarray(stripes).save(tmp_path / "wide" / name / "wide.png")
    image = _load("imagefolder", tmp_path / "wide", size=20).image(0)
    assert torch.equal(image, torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 20, 20))


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_picture_becomes_three_channels(tmp_path: Path, mode: str) -> None:
    ramp = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1)))
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(ramp).astype(np.uint16) * 257)
    else:
        picture = ramp.convert("RGB").convert(mode)
    for name in ("a", "b"):
        (tmp_path / "kinds" / name).mkdir(parents=True)
        picture.save(tmp_path / "kinds" / name / "ramp.tif")
    images = _load("imagefolder", tmp_path / "kinds", size=64)
    assert images.skipped == ()
    image = images.image(0)
    assert image.shape == (3, 64, 64)
    assert image[:, :, :16].mean() < 0.3 < 0.7 < image[:, :, 48:].mean()


def test_damaged_pictures_are_left_out_and_named(tree: Path) -> None:
    _truncate(tree / "cat" / "0003.jpg")
    (tree / "dog" / "0001.jpg").write_bytes(b"not a picture")
    (tree / "dog" / "gone.jpg").symlink_to(tree / "nowhere.jpg")
    train, test = _load("imagefolder", tree), _load("imagefolder", tree, "test")
    assert len(train) + len(test) == 22
    assert {*train.skipped, *test.skipped} == {"cat/0003.jpg", "dog/0001.jpg", "dog/gone.jpg"}
    assert not set(train.skipped) & set(test.skipped)
    for images in (train, test):
        for index in range(len(images)):
            images.image(index)


def test_the_damage_is_looked_for_once(
    tree: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _truncate(tree / "cat" / "0003.jpg")
    first = {*_load("imagefolder", tree).skipped, *_load("imagefolder", tree, "test").skipped}
    assert len(list(cache.iterdir())) == 1

    def fail(*_: object) -> bool:
        raise AssertionError("decoded again")

    monkeypatch.setattr(broken, "_is_whole", fail)
    again = {*_load("imagefolder", tree).skipped, *_load("imagefolder", tree, "test").skipped}
    assert again == first == {"cat/0003.jpg"}

    os.utime(tree / "bird" / "0000.jpg", (1, 1))
    with pytest.raises(AssertionError, match="decoded again"):
        _load("imagefolder", tree)


def test_a_spoilt_cache_is_made_again(tree: Path, cache: Path) -> None:
    _load("imagefolder", tree)
    (file,) = cache.iterdir()
    file.write_text("{")
    assert len(_load("imagefolder", tree)) > 0
    assert '"pictures": 24' in file.read_text()


def test_a_cache_that_cannot_be_written_is_done_without(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "file"))
    assert len(_load("imagefolder", tree)) > 0


def test_a_picture_that_breaks_later_is_told(tree: Path) -> None:
    images = _load("imagefolder", tree)
    for file in tree.rglob("*.jpg"):
        _truncate(file)
    with pytest.raises(DataError, match=r"can no longer be decoded"):
        images.image(0)


def test_mistakes_with_the_path_are_one_sentence(
    tmp_path: Path, photo: Image.Image, tree: Path
) -> None:
    with pytest.raises(DataError, match=r"^data\.path is needed for imagefolder"):
        _load("imagefolder")
    with pytest.raises(DataError, match="does not exist"):
        _load("imagefolder", tmp_path / "nowhere")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no pictures"):
        _load("imagefolder", tmp_path / "empty")
    with pytest.raises(DataError, match="in no class folder"):
        _load("imagefolder", tree / "cat")
    with pytest.raises(DataError, match="neither a folder nor a zip"):
        _load("imagefolder", tree / "cat" / "0000.jpg")
    for file in tree.rglob("*.jpg"):
        _truncate(file)
    with pytest.raises(DataError, match=r"all 24 pictures of .* are damaged"):
        _load("imagefolder", tree)


# CIFAR-10


def _write_batches(folder: Path, each: int = 4, protocol: int = 2) -> np.ndarray:
    """The official layout; returns the pixels of all train batches."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (each, 3072), dtype=np.uint8)
        batch = {
            b"batch_label": name.encode(),
            b"labels": [int(label) for label in rng.integers(0, 10, each)],
            b"data": data,
            b"filenames": [b"x.png"] * each,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
        pixels.append(data)
    meta = {b"num_cases_per_batch": each, b"label_names": [c.encode() for c in CIFAR_CLASSES]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol))
    return np.concatenate(pixels[:5])


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("given", ["cifar-10-batches-py", "."])
def test_the_official_batches_give_their_own_pixels(
    tmp_path: Path, given: str, protocol: int
) -> None:
    pixels = _write_batches(tmp_path / "cifar-10-batches-py", protocol=protocol)
    train = _load("cifar10", tmp_path / given, size=32)
    assert len(train) == 20
    assert len(_load("cifar10", tmp_path / given, "test")) == 4
    assert train.classes == CIFAR_CLASSES
    expected = torch.from_numpy(pixels[7].reshape(3, 32, 32)).float() / 255
    assert torch.allclose(train.image(7), expected)
    sent = pickle.dumps(train)
    assert len(sent) < pixels.nbytes / 4
    assert torch.equal(pickle.loads(sent).image(7), train.image(7))


def test_a_batch_stored_column_by_column_is_read_right(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    data = np.asfortranarray(np.arange(2 * 3072).reshape(2, 3072) % 251).astype(np.uint8)
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": data, b"labels": [1, 2]}, 2))
    image = _load("cifar10", folder, "test", size=32).image(1)
    assert torch.allclose(image.flatten() * 255, torch.from_numpy(data[1]).float())


class _Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_batch_that_wants_to_run_something_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    mark = tmp_path / "was_here"
    payload = {b"data": _Malicious(mark), b"labels": []}
    (folder / "data_batch_3").write_bytes(pickle.dumps(payload, 2))
    with pytest.raises(DataError, match=r"data_batch_3 asks to load '\w+\.mkdir'.*do not trust"):
        _load("cifar10", folder)
    assert not mark.exists()


def test_an_array_of_objects_is_no_batch(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    payload = {b"data": np.array([[None] * 3072], dtype=object), b"labels": [0]}
    (folder / "test_batch").write_bytes(pickle.dumps(payload, 2))
    with pytest.raises(DataError, match=r"test_batch asks to load .an array of .*do not trust"):
        _load("cifar10", folder, "test")


def test_a_missing_or_garbled_batch_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match="data_batch_2 is missing"):
        _load("cifar10", folder)
    _truncate(folder / "test_batch")
    with pytest.raises(DataError, match="test_batch is damaged"):
        _load("cifar10", folder, "test")


@pytest.fixture
def small_cifar(tmp_path: Path, photo: Image.Image) -> Path:
    root = tmp_path / "cifar_tree"
    _make_tree(root / "train", photo, list(CIFAR_CLASSES), 2)
    _make_tree(root / "test", photo, list(CIFAR_CLASSES), 1)
    return root


def test_a_tree_a_zip_and_two_zips_are_the_same_cifar10(small_cifar: Path, tmp_path: Path) -> None:
    one = _zip_folder(small_cifar, tmp_path / "one.zip")
    wrapped = _zip_folder(small_cifar, tmp_path / "wrapped.zip", "CIFAR-10/")
    two, bare = tmp_path / "two", tmp_path / "bare"
    two.mkdir()
    bare.mkdir()
    for split in ("train", "test"):
        _zip_folder(small_cifar / split, two / f"cifar10_{split}_jpeg.zip", f"{split}/")
        _zip_folder(small_cifar / split, bare / f"cifar10_{split}.zip")
    for split, count in (("train", 20), ("test", 10)):
        expected = _load("cifar10", small_cifar, split)
        assert len(expected) == count
        assert expected.classes == CIFAR_CLASSES
        for path in (one, wrapped, two, bare):
            found = _load("cifar10", path, split)
            assert found.classes == expected.classes
            assert np.array_equal(found.labels, expected.labels)
            assert torch.equal(found.image(count - 1), expected.image(count - 1))


def test_classes_of_other_names_are_sorted(tmp_path: Path, photo: Image.Image) -> None:
    root = _make_tree(tmp_path / "others", photo, ["truck", "zebra", "airplane"], 3)
    assert _load("cifar10", root).classes == ("airplane", "truck", "zebra")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_same_index_is_the_same_image_in_another_process(
    small_cifar: Path, tmp_path: Path, method: str
) -> None:
    zipped = _load("cifar10", _zip_folder(small_cifar, tmp_path / "one.zip"))
    sets = [_load("photos"), _load("lfw_subset"), zipped]
    here = [images.image(11).numpy() for images in sets]  # so the zip is open when it is sent
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        there = pool.submit(_images_as_numpy, sets, 11).result()
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def _images_as_numpy(sets: list[ImageSet], index: int) -> list[np.ndarray]:
    return [images.image(index).numpy() for images in sets]


def test_a_damaged_picture_in_a_zip_is_left_out(small_cifar: Path, tmp_path: Path) -> None:
    _truncate(small_cifar / "train" / "cat" / "0001.jpg")
    images = _load("cifar10", _zip_folder(small_cifar, tmp_path / "one.zip"))
    assert images.skipped == ("train/cat/0001.jpg",)
    assert len(images) == 19


def test_a_broken_zip_is_told(small_cifar: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    _truncate(_zip_folder(small_cifar, folder / "train.zip"))
    with pytest.raises(DataError, match="cannot be read as a zip"):
        _load("cifar10", folder)


# Pictures nobody here made


def test_imagenet_with_one_picture_a_class_is_split() -> None:
    if not (SHARED / "imagenet").is_dir():
        pytest.skip("the shared ImageNet pictures are not here")
    train = _load("imagefolder", SHARED / "imagenet", size=64)
    test = _load("imagefolder", SHARED / "imagenet", "test", size=64)
    assert len(train) + len(test) == 200
    assert len(train.classes) == 200
    assert 20 <= len(test) <= 60
    assert train.skipped == test.skipped == ()
    assert test.image(0).shape == (3, 64, 64)


def test_the_real_cifar10_zip_is_whole() -> None:
    archive = SHARED / "cifar10" / "cifar10_test_jpeg.zip"
    if not archive.is_file():
        pytest.skip("the shared CIFAR-10 zips are not here")
    images = _load("cifar10", archive, size=32)  # it holds test/ only, which is divided
    assert 7_800 < len(images) < 8_200
    assert images.classes == CIFAR_CLASSES
    assert images.skipped == ()
    assert images.image(0).shape == (3, 32, 32)


def test_a_picture_is_decoded_once_and_comes_back_the_same() -> None:
    from fedsim.clients.data.photos import Photos
    from fedsim.clients.data.pictures import Remembered

    class Counting(Photos):
        asked = 0

        def image(self, index: int) -> torch.Tensor:
            self.asked += 1
            return super().image(index)

    source = Counting(DataSpec(image_size=32), "test")
    one = source.image(0)
    kept = Remembered(source, limit=2 * one.numel())  # a byte a number: room for two
    seen = [[kept.image(i) for i in (0, 1, 2)] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert torch.equal(seen[1][0], one)
    assert source.asked == 1 + 3 + 1  # the third did not fit
    seen[1][0].zero_()
    assert torch.equal(kept.image(0), one)  # what is handed out is the caller's own
