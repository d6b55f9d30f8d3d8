"""Data sets named by their import path: as clients' data, as the attacker's, and their mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.campaign.plan import load_surrogate, prepare
from fedsim.clients.data import DATASETS, ImageSet, Split, known_as, load_images
from fedsim.core.errors import DataError, SpecError
from fedsim.core.registry import find
from fedsim.core.spec import DataSpec
from tests.conftest import small_spec


class Stripes(ImageSet):
    """Dark or bright pictures with stripes."""

    def __init__(self, data: DataSpec, split: Split):
        self.classes = ("dark", "bright")
        self.labels = np.arange(64 if split == "train" else 16) % 2
        self._side = data.image_size

    def image(self, index: int) -> torch.Tensor:
        row = torch.linspace(0, 0.5, self._side).roll(index)
        return (row + 0.4 * self.labels[index]).expand(3, self._side, -1)


class Unlabelled(Stripes):
    def __init__(self, data: DataSpec, split: Split):
        super().__init__(data, split)
        self.labels = self.labels + 1


def load(data: DataSpec, split: Split) -> ImageSet:
    if data.label == "missing":
        raise DataError("these stripes are not on this machine.")
    return Stripes(data, split)


def a_list(data: DataSpec, split: Split) -> list[int]:
    return [1, 2]


def broken(data: DataSpec, split: Split) -> ImageSet:
    raise KeyError("stripes")


constant = 3


def named(name: str, **fields: str) -> DataSpec:
    return DataSpec(name=f"{__name__}:{name}", image_size=32, **fields)


@pytest.mark.parametrize("name", ["load", "Stripes"])
def test_a_function_or_a_class_is_a_data_set(name: str) -> None:
    train, test = (load_images(named(name), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (64, 16)
    assert train.classes == ("dark", "bright")
    assert train.image(1).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a_list", r"gave a list; it must give an ImageSet"),
        ("broken", r"cannot be loaded: KeyError: 'stripes'"),
        ("constant", r"is no function of \(data, split\)"),
        ("nowhere", r"cannot be imported: AttributeError"),
        ("Unlabelled", r"labels that number them from 0"),
    ],
)
def test_a_mistake_of_its_author_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_images(named(name), "train")


def test_a_refusal_of_its_own_is_told_as_it_is() -> None:
    with pytest.raises(DataError, match=r"^these stripes are not on this machine"):
        load_images(named("load", label="missing"), "train")


def test_an_audit_runs_on_a_data_set_named_by_its_import_path(tmp_path: Path) -> None:
    run = audit(small_spec(f"data.name={__name__}:load"), tmp_path / "run")
    solved = run.scores[run.scores["attack"] == "patch_solve"]
    assert (solved["psnr"] >= 40).all()
    assert set(solved["label_true"]) <= {0, 1}


def test_the_attackers_own_data_may_be_named_so_too() -> None:
    surrogate = f"threat={{model: D, surrogate: {{name: '{__name__}:load'}}}}"
    spec = small_spec(surrogate)
    prepare(spec)
    images = load_surrogate(spec)
    assert images is not None
    assert images.shape == (64, 3, 32, 32)


def test_the_clients_own_data_under_another_name_is_no_surrogate() -> None:
    surrogate = f"threat={{model: D, surrogate: {{name: '{DATASETS['photos']}'}}}}"
    with pytest.raises(SpecError, match="the clients' own data"):
        prepare(small_spec(surrogate))


@pytest.mark.parametrize("name", DATASETS)
def test_every_name_of_the_table_is_there(name: str) -> None:
    assert callable(find("data set", DATASETS, name))
    assert known_as(DATASETS[name]) == name
