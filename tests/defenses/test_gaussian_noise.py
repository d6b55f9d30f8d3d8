"""Gaussian noise: as strong as it says, and repeated by the seed."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Protocol, digest, local_update
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH, secret, upload


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


def test_noise_after_a_sparsification_leaves_its_zeros(vit) -> None:
    both = [
        create_defense("top_k", sparsity=0.9),
        create_defense("gaussian_noise", std=1.0, relative=True, sparse=True),
    ]
    sparse, noisy = (
        local_update(vit, BATCH, Protocol(), defenses=both[:n], rng=secret()).tensors
        for n in (1, 2)
    )
    for name in sparse:
        assert torch.equal(sparse[name] == 0, noisy[name] == 0)
    name = "blocks.0.mlp.fc1.weight"
    held = sparse[name] != 0
    apart = (noisy[name] - sparse[name])[held]
    assert float(apart.std()) == pytest.approx(
        float(sparse[name][held].square().mean().sqrt()), rel=0.1
    )


def test_noise_can_be_measured_by_the_whole_update(vit) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors
    noisy = upload(vit, create_defense("gaussian_noise", std=0.5, relative="update")).tensors
    whole = torch.cat([t.flatten() for t in plain.values()]).square().mean().sqrt()
    for name in ("blocks.0.mlp.fc1.weight", "patch_embed.proj.weight"):
        apart = noisy[name] - plain[name]
        assert float(apart.std()) == pytest.approx(0.5 * float(whole), rel=0.05)
