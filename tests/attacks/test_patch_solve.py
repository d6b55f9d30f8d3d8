"""Closed forms, on real photos and small models: what they recover, and what they say when not."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.closed.frame import fold_patches
from fedsim.attacks.closed.solvers import ridge_solve
from fedsim.attacks.patch_solve import distance_to_8_bit
from fedsim.core.errors import AttackError
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model, vit_parts
from fedsim.core.spec import ModelSpec, TrainSpec
from fedsim.defenses.frozen_pe import FrozenPE
from fedsim.defenses.sinusoidal_pe import SinusoidalPE
from tests.staging import (
    TINY,
    attack,
    observe,
    observe_net,
    photos,
    prepared,
)

WIDE = ModelSpec(options={"patch_size": 8, "depth": 2})


@pytest.mark.parametrize(
    "options",
    [
        {"patch_size": 8, "depth": 2, "embed_dim": 96},
        {"patch_size": 8, "depth": 2, "embed_dim": 96, "class_token": False, "global_pool": "avg"},
    ],
)
def test_patch_solve_recovers_one_image_exactly(options: dict) -> None:
    images, labels = photos(32, [70])
    result = attack(observe(ModelSpec(options=options), images, labels), "patch_solve", snap=False)
    assert float(psnr(images, result.images)) > 80
    assert result.labels is not None
    assert result.labels.tolist() == labels.tolist()


def test_patch_solve_snaps_to_the_stored_pixels_bit_for_bit() -> None:
    images, labels = photos(32, [3])
    result = attack(observe(TINY, images, labels), "patch_solve")
    assert torch.equal(result.images, images)
    assert any("8-bit" in note for note in result.notes)


def test_patch_solve_does_not_snap_what_is_not_near_the_grid() -> None:
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    result = attack(observe(TINY, images, torch.tensor([2])), "patch_solve")
    assert 60 < float(psnr(images, result.images)) < 160
    assert distance_to_8_bit(images) == pytest.approx(0.25, abs=0.02)


def test_patch_solve_survives_a_little_noise_by_its_ridge() -> None:
    images, labels = photos(32, [130])
    observation = observe(TINY, images, labels)
    coin = torch.Generator().manual_seed(0)
    for tensor in observation.update.tensors.values():
        tensor += 1e-3 * tensor.square().mean().sqrt() * torch.randn(tensor.shape, generator=coin)
    chosen = attack(observation, "patch_solve")
    plain = attack(observation, "patch_solve", ridge=0.0)
    assert float(psnr(images, chosen.images)) > 20
    assert float(psnr(images, chosen.images)) >= float(psnr(images, plain.images)) - 0.5


def test_patch_solve_says_when_the_rank_is_too_small() -> None:
    narrow = ModelSpec(options={"patch_size": 4, "depth": 2, "embed_dim": 48})
    images, labels = photos(32, [200])
    result = attack(observe(narrow, images, labels), "patch_solve")
    assert any("rank 47 for 64 patches" in note for note in result.notes)


def test_patch_solve_says_that_a_batch_is_a_blend() -> None:
    images, labels = photos(32, [1, 100])
    result = attack(observe(TINY, images, labels), "patch_solve")
    assert len(result.images) == 2
    assert any("batch of 2" in note for note in result.notes)


def test_patch_solve_declines_without_the_position_gradient() -> None:
    images, labels = photos(32, [1])
    observation = observe(TINY, images, labels)
    del observation.update.tensors["pos_embed"]
    with pytest.raises(AttackError, match="pos_embed"):
        attack(observation, "patch_solve")


def test_patch_solve_needs_no_head() -> None:
    images, labels = photos(32, [1])
    observation = observe(TINY, images, labels)
    del observation.update.tensors["head.weight"], observation.update.tensors["head.bias"]
    result = attack(observation, "patch_solve")
    assert torch.equal(result.images, images)
    assert result.labels is None
    assert any("no labels" in note for note in result.notes)


def test_patch_solve_declines_numbers_that_are_not_finite() -> None:
    images, labels = photos(32, [1])
    observation = observe(TINY, images, labels)
    observation.update.tensors["pos_embed"][0, 3] = float("inf")
    with pytest.raises(AttackError, match="finite"):
        attack(observation, "patch_solve")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "clip": 1.0},
        {"weight_decay": 0.05, "momentum": 0.9},
    ],
)
def test_patch_solve_survives_local_steps_on_one_image(options: dict) -> None:
    images, labels = photos(32, [70])
    train = TrainSpec(upload="delta", local_steps=5, lr=0.01, **options)
    result = attack(observe(TINY, images, labels, train), "patch_solve", threat="C", snap=False)
    assert float(psnr(images, result.images)) > 45


def test_patch_solve_says_that_adamw_bends_its_system() -> None:
    images, labels = photos(32, [70])
    train = TrainSpec(upload="delta", local_steps=2, lr=0.001, optimizer="adamw")
    result = attack(observe(TINY, images, labels, train), "patch_solve", threat="C")
    assert any("adamw" in note for note in result.notes)


# -- closed forms ---------------------------------------------------------------------------


def test_row_space_breaks_a_frozen_random_position_embedding() -> None:
    images, labels = photos(32, [70])
    net = prepared(WIDE, 32, FrozenPE().prepare_model)
    observation = observe_net(net, WIDE, images, labels)
    assert "pos_embed" not in observation.update.tensors
    result = attack(observation, "row_space", lambda: prepared(WIDE, 32, FrozenPE().prepare_model))
    assert float(psnr(images, result.images)) > 35
    assert result.notes == []


def test_row_space_is_stopped_by_positions_of_low_rank_and_says_so() -> None:
    images, labels = photos(64, [70])
    net = prepared(WIDE, 64, SinusoidalPE().prepare_model)
    observation = observe_net(net, WIDE, images, labels)
    result = attack(
        observation, "row_space", lambda: prepared(WIDE, 64, SinusoidalPE().prepare_model)
    )
    assert float(psnr(images, result.images)) < 20
    assert any("underdetermined" in note and "rank" in note for note in result.notes)


def test_row_space_says_when_it_has_too_few_equations() -> None:
    narrow = ModelSpec(options={"patch_size": 4, "depth": 2, "embed_dim": 96})
    images, labels = photos(32, [70])
    result = attack(observe(narrow, images, labels), "row_space")
    assert any("underdetermined" in note and "unknowns" in note for note in result.notes)


PLAIN = ModelSpec(options={"patch_size": 4, "depth": 2, "plain_first_block": True})


def test_april_closed_is_exact_on_architecture_a_in_float64() -> None:
    images, labels = photos(32, [70])
    net = build_model(PLAIN, image_size=32, num_classes=8, seed=0).double()
    result = attack(observe_net(net, PLAIN, images.double(), labels), "april_closed")
    assert float(psnr(images, result.images)) > 80


def test_april_closed_declines_any_other_first_block() -> None:
    images, labels = photos(32, [70])
    with pytest.raises(AttackError, match="plain_first_block"):
        attack(observe(TINY, images, labels), "april_closed")


def test_april_closed_says_what_the_pseudo_inverse_loses() -> None:
    spec = ModelSpec(
        options={"patch_size": 16, "depth": 2, "embed_dim": 96, "plain_first_block": True}
    )
    images, labels = photos(64, [70])
    result = attack(observe(spec, images, labels), "april_closed")
    assert any("96 channels for 768 pixels" in note for note in result.notes)


@pytest.mark.parametrize("activation", ["leaky_relu", "tanh"])
def test_rgap_inverts_a_convolutional_network_layer_by_layer(activation: str) -> None:
    options = {"channels": [12, 16], "strides": [1, 2], "activation": activation}
    spec = ModelSpec(name="convnet", options=options)
    images, labels = photos(8, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert float(psnr(images, result.images)) > 40


def test_rgap_finds_the_features_without_a_head_bias() -> None:
    options = {"channels": [12], "strides": [1], "activation": "leaky_relu", "head_bias": False}
    spec = ModelSpec(name="convnet", options=options)
    images, labels = photos(8, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert float(psnr(images, result.images)) > 40


def test_rgap_says_when_a_layer_loses_information() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [2], "strides": [4]})
    images, labels = photos(16, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert any("underdetermined: rank" in note for note in result.notes)


def test_rgap_declines_what_is_no_plain_chain() -> None:
    images, labels = photos(32, [70])
    with pytest.raises(AttackError, match="plain chains"):
        attack(observe(TINY, images, labels), "rgap")


def test_the_ridge_is_small_for_clean_and_large_for_noisy_equations() -> None:
    coin = torch.Generator().manual_seed(0)
    a = (
        torch.randn(60, 30, generator=coin).double()
        @ torch.diag(torch.logspace(0, -5, 30)).double()
    )
    x = torch.randn(30, 8, generator=coin).double()
    noise = torch.randn(60, 8, generator=coin).double()
    clean, noisy = ridge_solve(a, a @ x), ridge_solve(a, a @ x + 1e-2 * noise)
    assert clean.ridge < 1e-12 < noisy.ridge
    assert torch.linalg.norm(clean.x - x) < 1e-6 * torch.linalg.norm(x)
    plain = ridge_solve(a, a @ x + 1e-2 * noise, ridge=0.0)
    assert torch.linalg.norm(noisy.x - x) < 0.1 * torch.linalg.norm(plain.x - x)


def test_folding_patches_undoes_what_the_convolution_sees() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    parts = vit_parts(model)
    images, _ = photos(32, [9])
    patches = torch.nn.functional.unfold(images, 8, stride=8)[0].T
    assert torch.equal(fold_patches(patches, parts), images[0])
