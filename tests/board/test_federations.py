"""Which runs stand in one section, and what their defenses are called."""

from __future__ import annotations

import pytest

from fedsim.board.federations import defense_of, federation_of
from tests.conftest import small_spec


@pytest.mark.parametrize(
    "override", ["seed=7", "name=x", "defenses=[{name: clipping, norm: 1.0}]", "audit.victims=1"]
)
def test_defenses_seeds_and_names_change_no_federation(override: str) -> None:
    assert federation_of(small_spec(override)) == federation_of(small_spec())


@pytest.mark.parametrize(
    "override",
    [
        *("train.batch_size=2", "data.image_size=64", "threat=D", "train.lr=0.1"),
        *("threat.oracle_labels=true", "audit.rounds=[1]", "threat.withhold=[defenses]"),
        "model.options.depth=1",
    ],
)
def test_what_is_not_the_same_federation_has_a_section_of_its_own(override: str) -> None:
    assert federation_of(small_spec(override)).key != federation_of(small_spec()).key


def test_a_section_says_what_the_attacker_may_do_and_not_where_pictures_lie() -> None:
    spec = small_spec("threat.oracle_labels=true", "data.name=imagefolder", "data.path=/home/me/x")
    federation = federation_of(spec)
    assert federation.title.endswith("batch 1, threat C with the true labels")
    assert "imagefolder" in federation.title
    assert "home" not in federation.title
    assert "one gradient, sgd, learning rate 0.05" in federation.protocol


def test_a_defense_is_told_with_its_strength_and_guards_count() -> None:
    defenses = "defenses=[{name: clipping, norm: 1.0}, {name: 'mine:Mask', soft: true}]"
    name, strength, key = defense_of(small_spec(defenses, "guards=[{name: d_snr}]"))
    assert (name, strength) == ("clipping + Mask + d_snr", "norm 1.0 + soft + as it is")
    assert key != defense_of(small_spec(defenses))[2]
    assert defense_of(small_spec())[:2] == ("none", "")
