"""Facts of a spec, without its data and without weights."""

from __future__ import annotations

import pytest

from tests.lint.conftest import linted, predicts_exact, severities, vit


def test_a_spec_is_linted_without_its_data() -> None:
    result = linted("data={name: cifar10, path: nowhere, clients: 4}")
    assert "10 classes" in result.of("absent-data")[0].reason
    assert predicts_exact(result)
    assert not linted().of("absent-data")


def test_a_model_too_large_to_be_filled_is_judged_by_its_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedsim.lint.facts.LARGEST", 1000)
    result = linted()
    assert severities(result, "exact-inversion") == ["likely"]
    assert result.of("not-rehearsed")
    assert not linted(vit(embed_dim=12)).of("exact-inversion")
