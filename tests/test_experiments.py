"""The specs that come with the project name things that exist, with parameters they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import create_attack
from defenses import create_defenses
from fedsim.core.spec import load_spec
from fedsim.planning import check_needs, labelled_attacks

SPECS = sorted((Path(__file__).parent.parent / "experiments").rglob("*.yaml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_of_ours_is_sound(path: Path) -> None:
    spec = load_spec(path)
    create_defenses(spec.defenses)
    labels = [label for label, _ in labelled_attacks(spec)]
    assert len(set(labels)) == len(labels)
    for _, component in labelled_attacks(spec):
        create_attack(component.name, **component.params)
        check_needs(component, spec)


def test_a_title_names_an_attack_in_the_tables() -> None:
    attacks = "[{name: patch_solve, title: no snap, snap: false}, {name: patch_solve}]"
    spec = load_spec({}, [f"attacks={attacks}"])
    assert [label for label, _ in labelled_attacks(spec)][:2] == ["no snap", "patch_solve"]
    assert spec.attacks[0].params == {"snap": False}
