"""What an attack returns: written whole, read back as it was, damage told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.core.attack import (
    Attack,
    Learner,
    Lesson,
    Reconstruction,
    needs_of,
    traits_of,
)
from fedsim.core.errors import RunError
from fedsim.core.files import read_json, save_tensors
from tests.faults import Declines


def example() -> Reconstruction:
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return Reconstruction(
        images,
        labels=torch.tensor([3, 1]),
        loss=0.25,
        trace=[(0, 1.0), (9, 0.25)],
        notes=["a note"],
        ledger=["update"],
        seconds=1.5,
        film={9: images[:1], 1: 1 - images[:1]},
        observation="a checksum",
        made_by="a job",
        code="a file",
    )


def test_a_reconstruction_comes_back_as_it_was(tmp_path: Path) -> None:
    made = example()
    made.save(tmp_path / "r.safetensors")
    found = Reconstruction.load(tmp_path / "r.safetensors")
    assert torch.equal(found.images, made.images)
    assert found.labels is not None
    assert found.labels.tolist() == [3, 1]
    for name in ("loss", "trace", "notes", "ledger", "seconds", "observation", "made_by", "code"):
        assert getattr(found, name) == getattr(made, name)


def test_what_is_said_of_candidates_comes_back_without_a_picture(tmp_path: Path) -> None:
    said = torch.rand(5, 2).double()
    made = Reconstruction(torch.zeros(0, 3, 4, 4), membership=said)
    made.save(tmp_path / "r.safetensors")
    found = Reconstruction.load(tmp_path / "r.safetensors")
    assert found.membership is not None
    assert torch.equal(found.membership, said)
    assert found.claims
    assert not Reconstruction(torch.zeros(0, 3, 4, 4), labels=torch.tensor([1])).claims


def test_a_film_is_kept_in_the_order_of_its_steps_at_a_byte_a_number(tmp_path: Path) -> None:
    made = example()
    made.save(tmp_path / "r.safetensors")
    film = Reconstruction.load(tmp_path / "r.safetensors").film
    assert list(film) == [1, 9]
    assert float((film[9] - made.film[9]).abs().max()) <= 0.5 / 255 + 1e-6


def test_an_attack_without_a_belief_in_labels_has_none(tmp_path: Path) -> None:
    Reconstruction(torch.zeros(1, 3, 4, 4)).save(tmp_path / "r.safetensors")
    assert Reconstruction.load(tmp_path / "r.safetensors").labels is None


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"images": torch.zeros(3, 4, 4)},
        {"images": torch.zeros(1, 3, 4, 4, dtype=torch.long)},
        {"images": torch.zeros(1, 3, 4, 4), "labels": torch.zeros(1)},
        {"images": torch.zeros(1, 3, 4, 4), "film.one": torch.zeros(1, 3, 4, 4)},
        {"images": torch.zeros(0, 3, 4, 4), "membership": torch.zeros(4)},
        {"images": torch.zeros(0, 3, 4, 4), "membership": torch.zeros(4, 3)},
        {"images": torch.zeros(0, 3, 4, 4), "membership": torch.zeros(4, 1, dtype=torch.long)},
        {"images": torch.zeros(0, 3, 4, 4), "membership": torch.full((4, 1), torch.nan)},
    ],
)
def test_a_file_that_holds_something_else_is_damaged(tmp_path: Path, tensors: dict) -> None:
    about = '{"loss": null, "trace": [], "notes": [], "ledger": [], "seconds": 0}'
    save_tensors(tmp_path / "r.safetensors", tensors, {"about": about})
    with pytest.raises(RunError, match=r"is damaged.*--resume"):
        Reconstruction.load(tmp_path / "r.safetensors")


def test_a_lesson_is_written_with_what_was_read(tmp_path: Path) -> None:
    Lesson(steps=2, losses=[[0, 1.0]], ledger=["traffic"]).save(tmp_path / "lesson.json")
    told = read_json(tmp_path / "lesson.json")
    assert (told["steps"], told["losses"], told["ledger"]) == (2, [[0, 1.0]], ["traffic"])


def test_what_needs_and_reconstructs_is_an_attack_and_no_learner() -> None:
    made = create_attack(f"{Declines.__module__}:Declines")
    assert isinstance(made, Attack)
    assert not isinstance(made, Learner)
    assert not isinstance(object(), Attack)


def test_a_learner_needs_what_it_learns_from() -> None:
    giml, inverter = create_attack("giml"), create_attack("inverter")
    assert (traits_of(giml).learns_from, traits_of(giml).rehearses) == ("traffic", False)
    assert (traits_of(inverter).learns_from, traits_of(inverter).rehearses) == ("surrogate", True)
    assert "traffic" in needs_of(giml)
    assert "traffic" not in needs_of(inverter)
    assert "surrogate" in needs_of(inverter)
    assert not traits_of(create_attack("dlg")).rehearses
