"""The attacks by name: found, checked, and declining where they do not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedsim.attacks import ATTACKS, create_attack
from fedsim.core.attack import Progress
from fedsim.core.errors import AttackError, SpecError
from fedsim.core.knowledge import FIELDS, View
from tests.staging import attack, convnet, convnet_observation


@pytest.mark.parametrize("name", ["april", "row_space", "april_closed", "patch_solve"])
def test_attacks_on_transformers_decline_a_convolutional_network(name: str) -> None:
    observation, _ = convnet_observation()
    params = {"steps": 2} if name == "april" else {}
    with pytest.raises(AttackError, match="Vision Transformers"):
        attack(observation, name, convnet, **params)


def test_an_unknown_attack_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'patch_solve'"):
        create_attack("patch_slove")


@pytest.mark.parametrize(
    ("params", "expected"),
    [({"step": 3}, "did you mean 'steps'"), ({"steps": 0}, "steps"), ({"lr": "fast"}, "lr")],
)
def test_a_wrong_parameter_is_one_sentence(params: dict, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        create_attack("inverting_gradients", **params)
    assert expected in str(caught.value)


def test_an_attack_of_somebodys_own_is_named_by_its_import_path() -> None:
    assert create_attack("tests.faults:Declines").needs == {"image_size", "batch_size"}
    with pytest.raises(SpecError, match="cannot be imported"):
        create_attack("tests.faults:Nobody")


@dataclass(frozen=True)
class Mute:
    """Says nothing of what it needs."""

    def reconstruct(self, view: View, *, device: torch.device, progress: Progress) -> None: ...


@dataclass(frozen=True)
class Idle:
    """Cannot attack."""

    needs: ClassVar[frozenset[str]] = frozenset({"update"})


@pytest.mark.parametrize(
    ("name", "expected"), [("Mute", "must say what it needs"), ("Idle", "no method reconstruct")]
)
def test_what_is_no_attack_is_refused(name: str, expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        create_attack(f"{__name__}:{name}")


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_can_be_made_and_needs_what_a_threat_model_can_grant(name: str) -> None:
    assert create_attack(name).needs <= FIELDS.keys()
