"""Lint under an active server: neither batches nor sums remove a finding, guards that refuse do."""

from __future__ import annotations

import pytest

from fedsim.core.spec import load_spec
from fedsim.lint import Finding, lint

BASE = [
    "data={image_size: 32, clients: 4}",
    "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
    "attacks=[{name: patch_solve}]",
]
ACTIVE = ["threat=F", "server.manoeuvre.name=fishing"]
SUM = "defenses=[{name: secure_aggregation}]"


def found(*overrides: str, rule: str = "active-server") -> list[Finding]:
    return lint(load_spec({}, [*BASE, *overrides])).of(rule)


@pytest.mark.parametrize("more", [[], ["train.batch_size=8"], ["train.batch_size=8", SUM]])
def test_neither_a_batch_nor_a_sum_hides_a_picture_from_an_active_server(more: list[str]) -> None:
    (finding,) = found(*ACTIVE, *more)
    assert (finding.severity, finding.threat) == ("certain", "F")
    assert finding.remedy == (
        "guards=[{name: d_snr, refuse: true}, {name: weight_check, refuse: true}]",
    )


def test_a_passive_server_is_no_active_one() -> None:
    assert found("threat=C", "train.batch_size=8") == []
    (finding,) = found("threat=C", rule="exact-inversion")
    assert finding.remedy == ("train.batch_size=8",)
    assert "for threats A to E; a server that chooses the weights" in finding.reason


def test_a_guard_is_a_remedy_only_if_it_refuses() -> None:
    warns, refuses = (
        "guards=[{name: weight_check}]",
        "guards=[{name: weight_check, refuse: true}]",
    )
    (finding,) = found(*ACTIVE, "train.batch_size=8", warns)
    assert finding.severity == "certain"
    assert finding.remedy == ("guards=[{name: weight_check, refuse: true}]",)
    (finding,) = found(*ACTIVE, "train.batch_size=8", refuses)
    assert (finding.severity, finding.remedy) == ("note", ())
    (warning,) = found("threat=C", warns, rule="guards-only-warn")
    assert warning.severity == "note"
    assert found("threat=C", refuses, rule="guards-only-warn") == []


@pytest.mark.parametrize(
    "guard",
    ["{name: d_snr, refuse: true}", "{name: weight_check, refuse: true, moved: 1.0e9}"],
)
def test_a_guard_that_lets_some_manoeuvres_through_is_no_remedy(guard: str) -> None:
    (finding,) = found(*ACTIVE, "train.batch_size=8", f"guards=[{guard}]")
    assert finding.severity == "likely"
    assert "would refuse some manoeuvres and let others through" in finding.reason


def test_the_batch_of_one_keeps_its_remedies_and_gains_the_guards() -> None:
    (finding,) = found(*ACTIVE, rule="exact-inversion")
    assert finding.remedy[0] == "train.batch_size=8"
    assert finding.remedy[1].startswith("guards=")


def test_a_picture_that_could_not_be_read_alone_is_not_found_in_a_batch() -> None:
    assert found(*ACTIVE, "train.batch_size=8", "model={name: resnet18}") == []


def test_several_steps_make_it_likely() -> None:
    steps = ["train.batch_size=8", "train.upload=delta", "train.local_steps=3"]
    (finding,) = found(*ACTIVE, *steps)
    assert finding.severity == "likely"
