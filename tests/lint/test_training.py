"""Findings on how clients train: what augmentation leaves, and a term that never acts."""

from __future__ import annotations

import pytest

import fedsim
from fedsim.core.errors import SpecError
from tests.lint.conftest import linted, severities

AUGMENT = "train.augment=[{name: RandomResizedCrop, scale: [0.5, 1]}, {name: MixUp}]"
PROX = "train={rounds: 2, strategy: FedProx, strategy_options: {proximal_mu: 1.0}"


def test_a_view_of_a_picture_is_told_to_leak_as_the_picture_does() -> None:
    found = linted(AUGMENT)
    assert "RandomResizedCrop, MixUp" in found.of("augmented")[0].reason
    assert "mixed with itself" in found.of("augmented")[0].reason
    assert found.of("exact-inversion")[0].severity == "certain"
    assert not linted().of("augmented")


def test_several_views_of_one_picture_are_several_pictures() -> None:
    one = ["data.clients=512", "train.upload=delta", "train.local_epochs=3"]
    assert linted(*one).facts.images == 1
    assert linted(*one, "train.augment=[{name: RandAugment}]").facts.images == 3


def test_a_proximal_term_of_one_step_is_told_to_do_nothing() -> None:
    assert linted(f"{PROX}}}").of("idle-proximal")
    assert not linted(f"{PROX}, upload: delta, local_steps: 3}}").of("idle-proximal")
    assert not linted().of("idle-proximal")


def test_training_that_could_not_run_is_a_mistake_in_the_spec() -> None:
    with pytest.raises(SpecError, match="no transform 'RandAugmnt'"):
        fedsim.lint({}, "train.augment=[{name: RandAugmnt}]")
    with pytest.raises(SpecError, match=r"train\.loss would do nothing"):
        fedsim.lint({}, "train.loss.label_smoothing=0.1", "defenses=[{name: dp_sgd}]")


def test_what_a_trained_part_leaves_is_told() -> None:
    (head,) = linted("train.trainable=head").of("partial-training")
    assert "head" in head.reason
    assert "features that the head reads of one picture exactly" in head.reason
    adam = ["train.trainable=head", "train.upload=delta", "train.optimizer=adam"]
    assert "exactly" not in linted(*adam).of("partial-training")[0].reason
    noisy = linted("train.trainable=head", "defenses=[{name: gaussian_noise, std: 0.1}]")
    assert "exactly" not in noisy.of("partial-training")[0].reason
    (lora,) = linted("train.trainable=lora").of("partial-training")
    assert "Adapters show products" in lora.reason
    assert "features" not in lora.reason
    assert not linted().of("partial-training")
    assert severities(linted("train.trainable=head"), "labels") == ["certain"]


def test_blocks_that_a_shallow_model_lacks_can_be_named() -> None:
    deep = "model.options.depth=4"
    found = linted(deep, "train.trainable=[blocks.3, head]")
    assert "blocks.3, head" in found.of("partial-training")[0].reason
    assert not found.of("exact-inversion")
    ends = linted(deep, "train.trainable=[lora, head]", "train.lora.targets=[blocks.3.attn.qkv]")
    assert ends.facts.adapted


def test_the_share_that_is_trained_is_of_the_whole_model() -> None:
    facts = [linted(f"model.options.depth={d}", "train.trainable=head").facts for d in (2, 4)]
    assert facts[0].trained == facts[1].trained
    assert facts[1].parameters > 1.8 * facts[0].parameters
