"""Dealing: a client's folder is all it needs, gives what a simulation gives, and is checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.clients import dealing
from fedsim.clients.data.pictures import ImageSet, packed
from fedsim.clients.dealing import (
    HOLDING,
    PUBLIC,
    open_holding,
    read_public,
    read_tested,
    write_public,
)
from fedsim.clients.shards import draw_batches, images_of, shards_of
from fedsim.core.errors import DataError
from fedsim.core.files import read_json, write_json
from fedsim.core.spec import Spec
from tests.clients.conftest import dealt, without_data
from tests.conftest import small_spec
from tests.layouts import make_tree

# -- what a client draws --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["photos", "imagefolder"])
@pytest.mark.parametrize(
    "partition",
    ["{kind: iid}", "{kind: dirichlet, alpha: 0.5}", "{kind: shard}", "{kind: natural}"],
)
def test_a_client_draws_from_its_folder_what_it_draws_in_a_simulation(
    kind: str, partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "photos" and "natural" in partition:
        partition = "{kind: pathological}"
    path = f"data.path={make_tree(tmp_path / 'tree')}" if kind == "imagefolder" else "seed=2"
    specs = [
        small_spec(f"data.name={kind}", f"data.partition={partition}", path, train, defenses)
        for train in ("train.batch_size=2", "train={batch_size: 3, local_epochs: 2, upload: delta}")
        for defenses in ("defenses=[]", "defenses=[{name: label_disguise, share: 0.5}]")
    ]
    folders = dealt(specs[0], tmp_path / "dealt")
    wanted = {(n, c): draw_batches(s, 2, c) for n, s in enumerate(specs) for c in range(4)}
    shutil.rmtree(tmp_path / "tree", ignore_errors=True)
    without_data(monkeypatch)
    for (number, client), expected in wanted.items():
        spec = specs[number]
        found = draw_batches(spec, 2, client, open_holding(folders[client], spec, client))
        assert [rows for rows, _ in found] == [rows for rows, _ in expected]
        for (_, (pictures, labels)), (_, (true, targets)) in zip(found, expected, strict=True):
            assert torch.equal(pictures, true)
            assert torch.equal(labels, targets)


# -- what is written ------------------------------------------------------------------------


def test_a_folder_holds_the_clients_own_pictures_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "MOST_PICTURES", 50)
    spec = small_spec("data.clients=3", "data.partition={kind: dirichlet, alpha: 0.5}")
    folders = dealt(spec, tmp_path)
    shards = shards_of(spec.data, spec.seed)
    for client, folder in enumerate(folders):
        held = open_holding(folder, spec, client)
        assert np.array_equal(held.indices, shards[client])
        files = sorted(folder.glob("train-*"))
        assert len(files) == -(-len(shards[client]) // 50) > 1
        assert not list(folder.glob("test-*"))
        pixels = len(shards[client]) * 3 * 32 * 32
        assert pixels < sum(file.stat().st_size for file in folder.iterdir()) < 1.1 * pixels
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(DataError, match="without the test split"):
            held.test()


def test_the_test_split_is_dealt_to_everyone_who_evaluates(tmp_path: Path) -> None:
    spec = small_spec("data.clients=2", "train.evaluate=true")
    public = images_of(spec.data, "test")
    for client, folder in enumerate(dealt(spec, tmp_path)):
        test = open_holding(folder, spec, client).test()
        assert np.array_equal(test.labels, public.labels)
        assert all(torch.equal(test.image(n), public.image(n)) for n in range(len(public)))


class Fine(ImageSet):
    """Pictures of which some have more than 8 bits."""

    classes = ("a", "b")
    labels = np.arange(20) % 2

    def image(self, index: int) -> torch.Tensor:
        coin = torch.Generator().manual_seed(index)
        picture = torch.rand(3, 32, 32, generator=coin)
        return picture if index % 3 else (picture * 255).round() / 255.0


def test_pictures_with_more_than_8_bits_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packed(Fine().image(0)).dtype == torch.uint8
    assert packed(Fine().image(1)).dtype == torch.float32
    spec = small_spec("data.clients=2", "seed=77")
    monkeypatch.setattr("fedsim.clients.shards.load_images", lambda data, split: Fine())
    images_of.cache_clear()
    shards_of.cache_clear()
    try:
        held = [open_holding(f, spec, n) for n, f in enumerate(dealt(spec, tmp_path))]
    finally:
        images_of.cache_clear()
        shards_of.cache_clear()
    rows = [(h, row, int(index)) for h in held for row, index in enumerate(h.indices)]
    assert len(rows) == 20
    assert all(torch.equal(h.own.image(row), Fine().image(index)) for h, row, index in rows)


def test_what_fits_is_kept_and_what_does_not_is_dealt_again(tmp_path: Path) -> None:
    spec = small_spec("data.clients=2")
    first, second = dealt(spec, tmp_path)
    before = (first / HOLDING).stat().st_mtime_ns
    file = second / "train-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    dealt(spec, tmp_path)
    assert (first / HOLDING).stat().st_mtime_ns == before
    assert file.read_bytes() == whole
    evaluated = small_spec("data.clients=2", "train.evaluate=true")
    dealt(evaluated, tmp_path)
    assert open_holding(first, evaluated, 0).test()
    other = small_spec("data.clients=2", "seed=9")
    dealt(other, tmp_path)
    assert open_holding(first, other, 0)


def test_a_tree_that_has_grown_is_dealt_again(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", classes=2)
    spec = small_spec("data.name=imagefolder", f"data.path={tree}", "data.clients=2")
    dealt(spec, tmp_path / "dealt")
    make_tree(tree, classes=2, each=24)
    images_of.cache_clear()
    shards_of.cache_clear()
    held = [open_holding(f, spec, n) for n, f in enumerate(dealt(spec, tmp_path / "dealt"))]
    for client, own in enumerate(held):
        assert np.array_equal(own.indices, shards_of(spec.data, spec.seed)[client])
    assert sum(len(own.indices) for own in held) == len(images_of(spec.data, "train"))


def test_what_others_wrote_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "letter.txt").write_text("dear client")
    with pytest.raises(DataError, match="holds something else"):
        dealt(small_spec("data.clients=2"), tmp_path)
    assert (tmp_path / "1" / "letter.txt").read_text() == "dear client"


def test_batches_that_do_not_fit_a_shard_are_refused_before_anything_is_dealt(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=r"train\.batch_size is 400"):
        dealt(small_spec("data.clients=2", "train.batch_size=400"), tmp_path / "dealt")
    assert not (tmp_path / "dealt").exists()


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("seed=5", "seed is 1 and not 5"),
        ("data.image_size=16", "data.image_size is 32 and not 16"),
        ("data.clients=3", "data.clients is 2 and not 3"),
        ("data.partition={kind: shard}", "another spec, whose data.partition"),
        ("data.path=/elsewhere", "data.path is None and not /elsewhere"),
    ],
)
def test_a_folder_of_another_spec_is_refused(change: str, expected: str, tmp_path: Path) -> None:
    spec = small_spec("data.clients=2", "train.clients_per_round=2")
    folders = dealt(spec, tmp_path)
    write_public(tmp_path / PUBLIC, spec)
    other = small_spec("data.clients=2", "train.clients_per_round=2", change)
    for opened in (
        lambda: open_holding(folders[0], other, 0),
        lambda: read_public(tmp_path / PUBLIC, other),
    ):
        with pytest.raises(DataError, match=expected) as caught:
            opened()
        assert "\n" not in str(caught.value)


def test_another_clients_folder_is_refused(tmp_path: Path) -> None:
    spec = small_spec("data.clients=2")
    folders = dealt(spec, tmp_path)
    with pytest.raises(DataError, match="dealt to client 1, and this is client 0"):
        open_holding(folders[1], spec, 0)


def test_other_settings_of_a_client_do_not_matter(tmp_path: Path) -> None:
    spec = small_spec("data.clients=2")
    folders = dealt(spec, tmp_path)
    held = open_holding(folders[1], small_spec("data.clients=2", "defenses=[{name: sign}]"), 1)
    assert np.array_equal(held.indices, shards_of(spec.data, spec.seed)[1])


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "rubbish", "another's"])
@pytest.mark.parametrize("name", [HOLDING, "train-00000.safetensors"])
def test_a_damaged_folder_is_one_sentence(damage: str, name: str, tmp_path: Path) -> None:
    spec = small_spec("data.clients=2")
    folders = dealt(spec, tmp_path)
    file = folders[0] / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "another's":
        shutil.copy(folders[1] / name, file)
    else:
        flipped = bytes(byte ^ 0x10 for byte in whole[-40:])
        contents = {"cut": whole[:-40], "flipped": whole[:-40] + flipped, "rubbish": b"no" * 99}
        file.write_bytes(contents[damage])
    with pytest.raises(DataError, match=r"damaged|missing|holds no pictures|dealt to") as caught:
        _read_all(folders[0], spec)
    assert str(folders[0]) in str(caught.value)
    assert "\n" not in str(caught.value)


def _read_all(folder: Path, spec: Spec) -> None:
    held = open_holding(folder, spec, 0)
    for row in range(len(held.own)):
        held.own.image(row)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no pictures of a client; deal them"):
        open_holding(tmp_path / "nowhere", small_spec(), 0)


def test_the_server_is_told_how_many_classes_and_test_pictures_there_are(tmp_path: Path) -> None:
    spec = small_spec("train.evaluate=true")
    write_public(tmp_path / "public.json", spec)
    assert read_public(tmp_path / "public.json", spec) == len(images_of(spec.data, "test").classes)
    assert read_tested(tmp_path / "public.json", spec) == len(images_of(spec.data, "test"))
    write_public(tmp_path / "public.json", small_spec("train.evaluate=false"))
    assert read_tested(tmp_path / "public.json", spec) is None


def test_a_public_file_from_before_says_nothing_of_test_pictures(tmp_path: Path) -> None:
    spec = small_spec("train.evaluate=true")
    write_public(tmp_path / "public.json", spec)
    about = read_json(tmp_path / "public.json")
    del about["tested"]
    write_json(tmp_path / "public.json", about)
    assert read_tested(tmp_path / "public.json", spec) is None
    assert read_public(tmp_path / "public.json", spec) > 1


def test_a_missing_or_damaged_public_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no"):
        read_public(tmp_path / "public.json", small_spec())
    for content in ("{", "[]", '{"classes": 0}', '{"classes": 8, "tested": -1}'):
        (tmp_path / "public.json").write_text(content)
        with pytest.raises(DataError, match="is damaged"):
            read_public(tmp_path / "public.json", small_spec())
