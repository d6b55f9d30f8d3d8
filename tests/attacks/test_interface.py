"""What an attack says of itself: needs, uses, its own check; and who reads the traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedsim.attacks import ATTACKS, create_attack
from fedsim.campaign.plan import observed_rounds, prepare
from fedsim.core.attack import Attack, Progress, Reconstruction, needs_of, reads_traffic
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import FIELDS, THREATS, View
from fedsim.core.spec import Spec, load_spec


@dataclass(frozen=True)
class Bare:
    """Only what an attack must have."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        side = view.image_size
        return Reconstruction(torch.full((view.batch_size, 3, side, side), 0.5))


@dataclass(frozen=True)
class Listener(Bare):
    """Reads the traffic where it may, and can do without."""

    uses: ClassVar[frozenset[str]] = frozenset({"traffic"})


@dataclass(frozen=True)
class Choosy(Bare):
    """Wants large images."""

    def check_spec(self, spec: Spec) -> None:
        if spec.data.image_size < 100:
            raise AttackError("choosy wants images of 100 pixels.")


def spec_of(attack: str, *overrides: str) -> Spec:
    small = ["data={image_size: 16, clients: 2}", "model.name=convnet", "train.rounds=3"]
    named = f"attacks=[{{name: '{attack}'}}]"
    return load_spec({}, [*small, "audit.rounds=[3]", named, *overrides])


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_says_what_it_needs_and_uses(name: str) -> None:
    attack = create_attack(name)
    assert isinstance(attack, Attack)
    assert attack.needs | attack.uses <= set(FIELDS)


def test_an_attack_of_needs_and_reconstruct_alone_is_completed() -> None:
    attack = create_attack(f"{__name__}:Bare")
    assert attack.uses == frozenset()
    assert prepare(spec_of(f"{__name__}:Bare")).spec.attacks


def test_an_attack_refuses_a_spec_before_any_round() -> None:
    with pytest.raises(AttackError, match="wants images of 100 pixels"):
        prepare(spec_of(f"{__name__}:Choosy"))


def test_who_needs_uses_or_learns_from_the_traffic_reads_it_where_it_is_granted() -> None:
    grants = THREATS["C"].grants
    readers = [name for name in ATTACKS if reads_traffic(create_attack(name), grants)]
    assert readers == ["giml", "imprint", "joint"]
    listener = create_attack(f"{__name__}:Listener")
    assert reads_traffic(listener, grants)
    assert not reads_traffic(listener, grants - {"traffic"})
    assert "traffic" not in needs_of(listener)


def test_the_rounds_between_are_kept_for_an_attack_that_only_uses_the_traffic() -> None:
    assert observed_rounds(spec_of(f"{__name__}:Bare")) == [3]
    assert observed_rounds(spec_of(f"{__name__}:Listener")) == [1, 2, 3]
    withheld = "threat={model: C, withhold: [traffic]}"
    assert observed_rounds(spec_of(f"{__name__}:Listener", withheld)) == [3]
