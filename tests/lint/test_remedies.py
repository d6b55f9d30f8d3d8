"""Remedies: each removes its finding."""

from __future__ import annotations

import pytest

from tests.lint.conftest import defended, linted, severities, vit


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [defended("clipping")],
        [defended("frozen_pe"), vit(embed_dim=192)],
        [defended("mjp")],
        ["model={name: test_resnet}", "train.batch_size=4"],
        [defended("secure_aggregation"), "train.clients_per_round=1"],
        [defended("secure_aggregation", "gaussian_noise")],
        [defended("dp_sgd", "soteria")],
        [defended({"name": "local_dp", "epsilon": 1000})],
        ["attacks=[{name: dlg}]", "train.rounds=1"],
        ["threat={model: C, oracle_labels: true}"],
        ["data.clients=512", "train.upload=delta", "train.local_epochs=3"],
    ],
)
def test_every_remedy_removes_its_finding(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.lint.rehearsal.DRAWS", 1)
    monkeypatch.setattr("fedsim.lint.rehearsal.CHANCES", 2)
    curable = [finding for finding in linted(*overrides).findings if finding.remedy]
    assert curable
    for finding in curable:
        cured = linted(*overrides, *finding.remedy)
        assert finding.severity not in severities(cured, finding.rule), finding
