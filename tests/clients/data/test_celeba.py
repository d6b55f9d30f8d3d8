"""CelebA's official files: attributes, identities, splits, and clients that are people."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.clients.shards import images_of, shards_of
from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec
from tests.conftest import small_spec
from tests.layouts import Celeba, load, names_of


@pytest.fixture
def celeba(tmp_path: Path) -> Celeba:
    return Celeba(tmp_path / "celeba")


def test_the_label_is_the_attribute_and_the_split_the_official_one(celeba: Celeba) -> None:
    train, test = load("celeba", celeba.root), load("celeba", celeba.root, "test")
    assert train.classes == test.classes == ("not_Smiling", "Smiling")
    assert names_of(train) == [f for f in celeba.files if celeba.part[f] == 0]
    assert {celeba.part[f] for f in names_of(test)} == {1, 2}
    assert train.labels.tolist() == [celeba.smiles[f] for f in names_of(train)]
    assert test.labels.tolist() == [celeba.smiles[f] for f in names_of(test)]
    assert train.groups is not None
    assert train.groups.tolist() == [celeba.person[f] for f in names_of(train)]


def test_another_attribute_can_be_the_label(celeba: Celeba) -> None:
    bald = load("celeba", celeba.root, label="Bald")
    assert bald.classes == ("not_Bald", "Bald")
    assert set(bald.labels) == {1}


def test_by_identity_every_person_is_a_class_and_some_pictures_of_people_are_held_out(
    celeba: Celeba,
) -> None:
    train = load("celeba", celeba.root, label="identity")
    test = load("celeba", celeba.root, "test", label="identity")
    assert train.classes == tuple(str(number) for number in range(92, 101))
    for images in (train, test):
        named = [images.classes[label] for label in images.labels]
        assert named == [str(celeba.person[f]) for f in names_of(images)]
    assert sorted(names_of(train) + names_of(test)) == celeba.files
    assert set(test.labels) <= set(train.labels)
    assert len(test) > 0


def test_the_archive_s_own_folders_and_its_zip_are_the_same_data_set(
    celeba: Celeba, tmp_path: Path
) -> None:
    archive = Celeba(tmp_path / "archive", archive=True)
    expected = load("celeba", celeba.root)
    for attempt in ("folders", "zip"):
        if attempt == "zip":
            archive.zip_pictures()
        found = load("celeba", archive.root)
        assert found.labels.tolist() == expected.labels.tolist()
        assert np.array_equal(found.groups, expected.groups)  # type: ignore[arg-type]
        assert torch.equal(found.image(5), expected.image(5))


def test_a_part_of_the_pictures_will_do(celeba: Celeba) -> None:
    for file in celeba.files[4:-4]:
        (celeba.pictures / file).unlink()
    assert len(load("celeba", celeba.root)) == 4


def test_a_damaged_face_is_left_out_and_named(celeba: Celeba) -> None:
    (celeba.pictures / "000002.jpg").write_bytes(b"")
    images = load("celeba", celeba.root)
    assert images.skipped == ("000002.jpg",)
    assert "000002.jpg" not in names_of(images)


def test_mistakes_are_one_sentence(celeba: Celeba, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.path is needed for celeba"):
        load("celeba", None)
    with pytest.raises(DataError, match="is no folder"):
        load("celeba", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no attribute 'smiling' \(did you mean 'Smiling'\?\)"):
        load("celeba", celeba.root, label="smiling")
    with pytest.raises(DataError, match=r"did you mean 'identity'"):
        load("celeba", celeba.root, label="identities")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"neither img_align_celeba/ nor img_align_celeba\.zip"):
        load("celeba", tmp_path / "empty")


def test_spoilt_lists_are_named(celeba: Celeba) -> None:
    whole = celeba.attributes.read_text()
    celeba.attributes.write_text(whole.replace("36\n", "37\n", 1))
    with pytest.raises(DataError, match="announces 37 pictures but lists 36"):
        load("celeba", celeba.root)
    celeba.attributes.write_text(whole.replace("000003.jpg  1 -1 -1", "000003.jpg  1 -1"))
    with pytest.raises(DataError, match=r"damaged line for '000003\.jpg'"):
        load("celeba", celeba.root)
    celeba.attributes.write_text(whole)
    celeba.identities.write_text("000001.jpg one\n")
    with pytest.raises(DataError, match=r"identity_CelebA\.txt has a damaged line"):
        load("celeba", celeba.root)
    celeba.identities.write_text("000001.jpg 1\n")
    with pytest.raises(DataError, match=r"does not list the picture 000002\.jpg"):
        load("celeba", celeba.root, label="identity")
    celeba.splits.write_text(celeba.splits.read_text().replace(" 2", " 7"))
    with pytest.raises(DataError, match="splits other than 0, 1 and 2"):
        load("celeba", celeba.root)
    celeba.splits.unlink()
    with pytest.raises(DataError, match=r"has no list_eval_partition\.txt"):
        load("celeba", celeba.root)


def test_no_person_is_on_two_clients(celeba: Celeba) -> None:
    def owners(seed: int) -> dict[int, int]:
        data = small_spec(
            f"data={{name: celeba, path: {celeba.root}, clients: 4, partition: {{kind: natural}}}}"
        ).data
        groups = images_of(data, "train").groups
        assert groups is not None
        shards = shards_of(data, seed)
        assert sorted(np.concatenate(shards)) == list(range(len(groups)))
        held = [set(groups[shard].tolist()) for shard in shards]
        assert sum(len(people) for people in held) == len(set(groups.tolist())) == 6
        return {person: client for client, people in enumerate(held) for person in people}

    assert owners(1) == owners(1)
    assert any(owners(1) != owners(seed) for seed in (2, 3, 4))


def test_without_identities_a_natural_partition_is_refused(celeba: Celeba) -> None:
    celeba.identities.unlink()
    data = DataSpec.model_validate(
        {"name": "celeba", "path": str(celeba.root), "partition": {"kind": "natural"}}
    )
    with pytest.raises(DataError, match="needs to know whose picture each is"):
        shards_of(data, 0)


def test_an_audit_runs_over_people(celeba: Celeba, tmp_path: Path) -> None:
    (celeba.pictures / "000002.jpg").write_bytes(b"cut")
    where = f"name: celeba, path: {celeba.root}, image_size: 32, clients: 3"
    spec = small_spec(f"data={{{where}, partition: {{kind: natural}}}}", "train.evaluate=true")
    run = audit(spec, tmp_path / "run")
    solved = run.scores[run.scores["attack"] == "patch_solve"]
    assert len(solved) == 4
    assert solved["psnr"].min() > 60
    assert set(solved["label_true"]) <= {0, 1}
    notes = [event["message"] for event in run.events()]
    assert "1 damaged picture was skipped: 000002.jpg" in notes
