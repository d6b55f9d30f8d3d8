"""The defenses: what they change, that it is on record, and that the seed makes it repeat."""

from __future__ import annotations

import pytest
import torch

from defenses import create_defense, create_defenses
from fedsim.core.errors import ModelError, SpecError
from fedsim.core.learning import Protocol, Trail, digest, learn, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import Component, ModelSpec

BATCH = [(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1]))]


@pytest.fixture
def vit():
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
    return build_model(spec, image_size=32, num_classes=5, seed=0)


def secret(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("relative", [False, True])
def test_gaussian_noise_has_the_strength_it_says(vit, relative: bool) -> None:
    noise = create_defense("gaussian_noise", std=0.01, relative=relative)
    plain = local_update(vit, BATCH, Protocol())
    noisy = local_update(vit, BATCH, Protocol(), defenses=[noise], rng=secret())
    for name in ("blocks.0.mlp.fc1.weight", "patch_embed.proj.weight"):
        difference = noisy.tensors[name] - plain.tensors[name]
        scale = plain.tensors[name].square().mean().sqrt() if relative else 1.0
        assert float(difference.std()) == pytest.approx(float(0.01 * scale), rel=0.05)


def test_the_clients_seed_repeats_the_noise(vit) -> None:
    noise = create_defense("gaussian_noise")
    first, same, other = (
        digest(local_update(vit, BATCH, Protocol(), defenses=[noise], rng=secret(s)).tensors)
        for s in (1, 1, 2)
    )
    assert first == same != other


def test_a_frozen_position_embedding_is_not_uploaded(vit) -> None:
    protected = create_defense("frozen_pe").prepare_model(vit)
    update = local_update(protected, BATCH, Protocol())
    assert "pos_embed" not in update.tensors
    assert "patch_embed.proj.weight" in update.tensors


def test_frozen_pe_refuses_a_model_without_one() -> None:
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError):
        create_defense("frozen_pe").prepare_model(resnet)


def test_a_defense_proves_that_it_changed_the_payload(vit) -> None:
    trail = Trail()
    noise = create_defense("gaussian_noise", std=0.1)
    update = learn(vit, BATCH, Protocol(), defenses=[noise], rng=secret(), trail=trail)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("GaussianNoise", "update")]
    assert trail.entries[0]["after"] == digest(update.tensors) != trail.entries[0]["before"]


def test_a_defense_that_does_nothing_leaves_no_proof(vit) -> None:
    trail = Trail()
    learn(vit, BATCH, Protocol(), defenses=[create_defense("gaussian_noise", std=0.0)], trail=trail)
    assert trail.entries == []


def test_bad_defenses_are_one_sentence() -> None:
    with pytest.raises(SpecError, match="did you mean 'gaussian_noise'"):
        create_defense("gausian_noise")
    with pytest.raises(SpecError, match="std"):
        create_defense("gaussian_noise", std=-1)
    twice = [Component(name="frozen_pe"), Component(name="frozen_pe")]
    with pytest.raises(SpecError, match="twice"):
        create_defenses(twice)
