"""Data sets of the hub's library: from disk, and what is said when the hub does not answer."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import socket
import time
from pathlib import Path
from typing import Any

import datasets
import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from huggingface_hub import HfApi, constants
from PIL import Image

from fedsim.clients.data import hub
from fedsim.core.errors import DataError
from tests.layouts import load, save_picture


def _picture(seed: int) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def _table(labels: list[int], start: int = 0, **columns: list[Any]) -> datasets.Dataset:
    content = {
        "img": [_picture(start + i) for i in range(len(labels))],
        "fine": labels,
        "coarse": [label % 2 for label in labels],
        **columns,
    }
    table = datasets.Dataset.from_dict(content)
    table = table.cast_column("img", datasets.Image())
    return table.cast_column("fine", datasets.ClassLabel(names=["ant", "bee", "cow"]))


def test_a_saved_data_set_gives_its_pictures_labels_and_splits(tmp_path: Path) -> None:
    held = {"train": _table([0, 2, 1, 0]), "test": _table([1, 1], start=50)}
    datasets.DatasetDict(held).save_to_disk(str(tmp_path / "saved"))
    train = load("hf:mine", tmp_path / "saved")
    test = load("hf:mine", tmp_path / "saved", "test")
    assert train.classes == ("ant", "bee", "cow")
    assert train.labels.tolist() == [0, 2, 1, 0]
    assert test.labels.tolist() == [1, 1]
    expected = np.asarray(Image.open(io.BytesIO(_picture(51)["bytes"])), dtype=np.float32) / 255
    assert torch.allclose(test.image(1), torch.from_numpy(expected).permute(2, 0, 1))
    assert torch.equal(pickle.loads(pickle.dumps(test)).image(1), test.image(1))


def test_a_hidden_test_split_leaves_validation_for_test(tmp_path: Path) -> None:
    held = {
        "train": _table([0, 2]),
        "test": _table([-1, -1, -1], start=20),
        "validation": _table([2, -1], start=30),
    }
    datasets.DatasetDict(held).save_to_disk(str(tmp_path / "saved"))
    assert load("hf:mine", tmp_path / "saved", "test").labels.tolist() == [2]


def test_a_single_table_is_divided_and_may_know_its_writers(tmp_path: Path) -> None:
    table = _table([i % 3 for i in range(30)], writer_id=[f"w{i // 5}" for i in range(30)])
    table.save_to_disk(str(tmp_path / "one"))
    train, test = load("hf:one", tmp_path / "one"), load("hf:one", tmp_path / "one", "test")
    assert len(train) + len(test) == 30
    assert len(train) > len(test) > 0
    assert train.groups is not None
    assert set(train.groups) == {0, 1, 2, 3, 4, 5}


def test_the_label_may_be_another_column(tmp_path: Path) -> None:
    held = {"train": _table([0, 2, 1]), "test": _table([1], start=9)}
    datasets.DatasetDict(held).save_to_disk(str(tmp_path / "saved"))
    images = load("hf:mine", tmp_path / "saved", label="coarse")
    assert images.classes == ("0", "1")
    assert images.labels.tolist() == [0, 0, 1]
    with pytest.raises(DataError, match=r"no column 'coarsest' \(did you mean 'coarse'\?\)"):
        load("hf:mine", tmp_path / "saved", label="coarsest")


def test_a_folder_of_pictures_is_loaded_as_the_library_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    for split in ("train", "test"):
        for c, name in enumerate(("cat", "dog")):
            for i in range(2):
                save_picture(tmp_path / "tree" / split / name / f"{i}.png", 2 * c + i)
    images = load("hf:tree", tmp_path / "tree")
    assert images.classes == ("cat", "dog")
    assert sorted(images.labels) == [0, 0, 1, 1]
    tree = load("imagefolder", tmp_path / "tree")
    assert any(torch.equal(images.image(0), tree.image(i)) for i in range(4))


def test_a_damaged_picture_is_told(tmp_path: Path) -> None:
    table = _table([0, 1, 2] * 4)
    broken = {"bytes": b"none", "path": None}
    table = datasets.Dataset.from_dict({"img": [broken] * 12, "fine": table["fine"][:]})
    table = table.cast_column("img", datasets.Image())
    table = table.cast_column("fine", datasets.ClassLabel(names=["ant", "bee", "cow"]))
    table.save_to_disk(str(tmp_path / "broken"))
    with pytest.raises(DataError, match=r"picture \d+ of the data set cannot be decoded"):
        load("hf:broken", tmp_path / "broken").image(0)


def test_what_is_no_data_set_of_pictures_is_told(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match="has no column of pictures; it has text"):
        load("hf:text", tmp_path / "text")
    _table([0, 1]).remove_columns(["fine"]).save_to_disk(str(tmp_path / "bare"))
    with pytest.raises(DataError, match=r"no column of classes; set data\.label to one of"):
        load("hf:bare", tmp_path / "bare")
    with pytest.raises(DataError, match="is no folder"):
        load("hf:none", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load("hf:none", tmp_path / "empty")


@pytest.mark.parametrize("error", [httpx.ConnectError("no route"), OSError("no network")])
def test_a_hub_that_does_not_answer_is_one_sentence_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(HfApi, "dataset_info", fail)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    offline = datasets.config.HF_HUB_OFFLINE
    began = time.monotonic()
    with pytest.raises(DataError, match=r"hub does not answer and 'nobody/nothing' is not in"):
        load("hf:nobody/nothing", None)
    assert time.monotonic() - began < 5
    assert offline == datasets.config.HF_HUB_OFFLINE
    with pytest.raises(DataError, match="names no data set"):
        load("hf:", None)


def _by_path(files: list[str]) -> datasets.Dataset:
    """A table whose rows name files instead of holding pictures."""
    rows = [{"bytes": None, "path": file} for file in files]
    storage = datasets.Features(
        {"img": datasets.Image(decode=False), "fine": datasets.Value("int64")}
    )
    table = datasets.Dataset.from_dict({"img": rows, "fine": [0] * len(rows)}, features=storage)
    table = table.cast_column("img", datasets.Image())
    return table.cast_column("fine", datasets.ClassLabel(names=["ant"]))


def test_a_row_that_names_a_file_elsewhere_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = save_picture(tmp_path / "private" / "face.png", 1)
    folder = tmp_path / "shared"
    inside = save_picture(folder / "own.png", 2)
    (folder / "link.png").symlink_to(secret)
    crooked = f"{folder}/../private/face.png"
    files = [str(secret), crooked, str(folder / "link.png"), "/etc/passwd", str(inside)]
    monkeypatch.setattr(hub, "_open_folder", lambda path: {"train": _by_path(files * 8)})
    images = load("hf:shared", folder)
    opened: dict[str, int] = {}
    for index in range(len(images)):
        row = int(images._rows[index])  # type: ignore[attr-defined]
        name = files[row % len(files)]
        if name == str(inside):
            assert images.image(index).shape == (3, 16, 16)
        else:
            with pytest.raises(DataError, match=f"picture {row} .*names a file outside of it"):
                images.image(index)
        opened[name] = opened.get(name, 0) + 1
    assert opened.keys() == set(files)


def test_a_row_of_the_hub_opens_what_was_fetched_with_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    own = save_picture(tmp_path / "hub" / "datasets--me--mine" / "blobs" / "a.png", 1)
    other = save_picture(tmp_path / "hub" / "datasets--you--yours" / "blobs" / "a.png", 2)
    monkeypatch.setattr(
        hub, "_open_hub", lambda title: {"train": _by_path([str(own), str(other)] * 8)}
    )
    images = load("hf:me/mine", None)
    rows = list(images._rows)  # type: ignore[attr-defined]
    assert images.image(next(i for i, row in enumerate(rows) if row % 2 == 0)).shape == (3, 16, 16)
    with pytest.raises(DataError, match="outside of it"):
        images.image(next(i for i, row in enumerate(rows) if row % 2 == 1))


def test_a_reader_of_pickles_and_a_folder_here_are_no_data_sets_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "own").mkdir(parents=True)
    for name in ("pandas", "csv", "mine/own"):
        with pytest.raises(DataError, match=f"'{name}' is no data set of the hub here"):
            load(f"hf:{name}", None)


def test_a_folder_that_only_looks_like_a_data_set_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for content in ("[]", "{}", '{"splits": [3]}', '{"splits": ["../.."]}', "\0"):
        (tmp_path / "saved" / "dataset_dict.json").write_text(content)
        with pytest.raises(DataError):
            load("hf:mine", tmp_path / "saved")


# -- columns that anybody may have written ------------------------------------------------------

PICTURE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
CLASSES = datasets.ClassLabel(names=["ant", "bee"])
Column = tuple[Any, pa.Array]


def _save_raw(folder: Path, **columns: Column) -> None:
    """A saved data set of 30 rows, written by hand: the library itself would look into it."""
    own: dict[str, Column] = {
        "image": (datasets.Image(), pa.array([_picture(0)] * 30, PICTURE)),
        "label": (CLASSES, pa.array([i % 2 for i in range(30)], pa.int64())),
    }
    own |= columns
    features = datasets.Features({name: kind for name, (kind, _) in own.items()})
    table = pa.table([values for _, values in own.values()], schema=features.arrow_schema)
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "x", "_split": None}
    shown = {"_format_columns": None, "_format_kwargs": {}, "_format_type": "numpy"}
    (folder / "state.json").write_text(json.dumps(state | shown | {"_output_all_columns": False}))
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))


@pytest.mark.parametrize("column", ["user", "label", "list of labels", "other"])
def test_no_column_but_the_pictures_own_leads_to_a_file_or_an_address(
    column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = save_picture(tmp_path / "face.png", 1)
    rows = [{"bytes": None, "path": str(secret)}, {"bytes": None, "path": "http://nosuch/a.png"}]
    name, kind, values = column, datasets.Image(), pa.array(rows * 15, PICTURE)
    if column == "list of labels":
        name, kind = "label", datasets.List(datasets.Image())
        values = pa.array([[row] for row in rows * 15], pa.list_(PICTURE))
    _save_raw(tmp_path / "saved", **{name: (kind, values)})
    seen: list[object] = []
    plain = Image.open
    monkeypatch.setattr(Image, "open", lambda *a, **k: seen.append(a) or plain(*a, **k))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: seen.append(a) or [])
    refused = pytest.raises(DataError, match="column")
    with refused if name == "label" else contextlib.nullcontext():
        assert load("hf:mine", tmp_path / "saved").groups is None
    with pytest.raises(DataError, match="column"):
        load("hf:mine", tmp_path / "saved", label=name)
    assert seen == []


LISTS = datasets.List(datasets.Value("int64"))
ODD: dict[str, tuple[str, Any, pa.Array, str]] = {
    "people of none": (
        *("user", datasets.Value("string"), pa.array([None, "x"] * 15, pa.string())),
        "row 0 of the data set has no value in its column 'user'",
    ),
    "a class of none": (
        *("label", CLASSES, pa.array([1, None] * 15, pa.int64())),
        "row 1 of the data set has no value in its column 'label'",
    ),
    "a word of none": (
        *("label", datasets.Value("string"), pa.array([None, "x"] * 15, pa.string())),
        "row 0 of the data set has no value in its column 'label'",
    ),
    "a class beyond the last": (
        *("label", CLASSES, pa.array([1, 99] * 15, pa.int64())),
        "row 1 of the data set is of class 99 by its column 'label', and there are 2",
    ),
    "a class below none": (
        *("label", CLASSES, pa.array([-7, 1] * 15, pa.int64())),
        "row 0 of the data set is of class -7",
    ),
    "classes of fractions": (
        *("label", datasets.Value("float64"), pa.array([float("nan"), 1.0] * 15)),
        "the column 'label' holds no classes",
    ),
    "classes of lists": (
        *("label", LISTS, pa.array([[1] * (i % 3) for i in range(30)], pa.list_(pa.int64()))),
        "the column 'label' holds no classes",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_values_that_are_none_or_no_classes_are_one_sentence(case: str, tmp_path: Path) -> None:
    name, kind, values, words = ODD[case]
    _save_raw(tmp_path / "saved", **{name: (kind, values)})
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        load("hf:mine", tmp_path / "saved")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "people",
    [
        ({"a": datasets.Value("int64")}, pa.array([{"a": i} for i in range(30)])),
        (LISTS, pa.array([[1] * (i % 3) for i in range(30)], pa.list_(pa.int64()))),
        (LISTS, pa.array([[1, 2]] * 30, pa.list_(pa.int64()))),
        (datasets.Value("float64"), pa.array([0.5] * 30)),
    ],
    ids=["mappings", "ragged lists", "lists", "fractions"],
)
def test_a_column_that_names_nobody_is_no_group(people: Column, tmp_path: Path) -> None:
    _save_raw(tmp_path / "saved", user=people)
    assert load("hf:mine", tmp_path / "saved").groups is None


def test_people_and_classes_may_be_numbers_or_words_however_the_table_is_shown(
    tmp_path: Path,
) -> None:
    _save_raw(
        tmp_path / "saved",
        label=(datasets.Value("int64"), pa.array([2**62, 1] * 15)),
        user=(datasets.Value("large_string"), pa.array(["b", "a"] * 15, pa.large_string())),
    )
    images = load("hf:mine", tmp_path / "saved")
    assert images.classes == ("1", str(2**62))
    assert images.groups is not None
    assert images.groups.tolist() == images.labels.tolist()
    assert images.image(0).shape == (3, 16, 16)


def test_splits_that_do_not_fit_each_other_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _table([0, 1, 2] * 10)
    other = {"train": whole, "test": whole.remove_columns(["img"])}
    monkeypatch.setattr(hub, "_open_folder", lambda path: other)
    with pytest.raises(DataError, match="has no column 'img' of pictures in one of its splits"):
        load("hf:mine", tmp_path, "test")
    other["test"] = whole.remove_columns(["fine"])  # without classes it is not for test
    assert 0 < len(load("hf:mine", tmp_path, "test")) < 30
    monkeypatch.setattr(hub, "_open_folder", lambda path: {})
    with pytest.raises(DataError, match="holds no table"):
        load("hf:mine", tmp_path)
