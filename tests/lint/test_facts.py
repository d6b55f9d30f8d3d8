"""Facts of a spec, without its data and without weights."""

from __future__ import annotations

import pytest

from tests.lint.conftest import defended, linted, predicts_exact, severities, vit


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


STRANGERS = {
    "TutorialViT": True,
    "HandWrittenViT": True,
    "TwoHeads": True,  # no labels, and a picture all the same
    "Chain": False,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_models_of_somebodys_own_are_linted(name: str) -> None:
    result = linted(f"model={{name: 'tests.tutorials:{name}'}}")
    assert predicts_exact(result) is STRANGERS[name]
    assert bool(result.of("labels")) is (name != "TwoHeads")


def test_positions_of_zeros_hold_and_those_of_full_rank_do_not() -> None:
    for places, exact in ((0.0, False), (0.5, True)):
        options = f"options: {{places: {places}}}"
        model = f"model={{name: 'tests.tutorials:TutorialViT', {options}}}"
        assert predicts_exact(linted(model, defended("frozen_pe"))) is exact


def test_a_head_of_zeros_hides_a_picture_for_one_round() -> None:
    small = "{patch_size: 8, hidden_dim: 48, num_layers: 1, num_heads: 4, mlp_dim: 64}"
    model = f"model={{name: 'torchvision.models:VisionTransformer', options: {small}}}"
    assert predicts_exact(linted(model))
    assert not predicts_exact(linted(model, "train.rounds=1"))


def test_coins_of_training_are_told() -> None:
    name = "model={name: 'tests.tutorials:Chain', options: {drop: 0.5}}"
    assert linted(name).of("random-training")
    assert not linted(name, "train.mode=eval").of("random-training")
