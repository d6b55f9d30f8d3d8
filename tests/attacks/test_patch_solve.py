"""The closed form on position embeddings: what it recovers, and what it says when not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.attacks.closed.eight_bit import distance_to_8_bit
from fedsim.core.errors import AttackError
from fedsim.core.lora import Lora
from fedsim.core.metrics import psnr
from fedsim.core.optimizers import Schedule
from fedsim.core.spec import ModelSpec, TrainSpec
from fedsim.core.trainable import restricted
from tests.staging import TINY, attack, observe, observe_net, photos, prepared


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
        {"schedule": Schedule("cosine"), "weight_decay": 0.05},
        {"strategy": "FedProx", "strategy_options": {"proximal_mu": 5.0}, "momentum": 0.9},
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


@pytest.mark.parametrize(
    "odd",
    [
        "Registers",
        "Grid",
        "Long",
        "TokenLast",
        "Unfolded",
        "InPlace",
        "RootNorm",
        "Scaled",
        "Gained",
    ],
)
def test_patch_solve_recovers_one_image_wherever_positions_are_kept(odd: str) -> None:
    images, labels = photos(32, [70])
    observation = observe(ModelSpec(name=f"tests.oddities:{odd}"), images, labels)
    result = attack(observation, "patch_solve", snap=False)
    assert float(psnr(images, result.images)) > 80


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("TwoAxes", "no parameter was found that is added to the patches as it is"),
        ("NormedPatches", "made of other parameters"),
        ("ConvStem", "no layer that reads patches"),
        ("Frozen", "did not upload"),
    ],
)
def test_patch_solve_says_which_part_an_odd_model_lacks(odd: str, words: str) -> None:
    images, labels = photos(32, [70])
    observation = observe(ModelSpec(name=f"tests.oddities:{odd}"), images, labels)
    with pytest.raises(AttackError, match=words):
        attack(observation, "patch_solve")


def adapted(rank: int, moved: float) -> nn.Module:
    """A ViT whose positions are trained, and an adapter on its patch projection."""
    net = prepared(TINY, 32, lambda model: model)
    net = restricted(net, ("lora", "pos_embed"), Lora(r=rank, targets=("patch_embed.proj",)))
    with torch.no_grad():
        net.patch_embed.proj.lora_B["default"].weight.normal_(std=moved)
    return net


@pytest.mark.parametrize(("rank", "moved"), [(32, 0.01), (192, 0.0)])
def test_an_adapter_on_the_projection_gives_the_picture_away(rank: int, moved: float) -> None:
    images, labels = photos(32, [70])
    net = adapted(rank, moved)
    result = attack(
        observe_net(net, TINY, images, labels), "patch_solve", lambda: copy.deepcopy(net)
    )
    assert float(psnr(images, result.images)) > 60


def test_a_projection_that_is_trained_beside_its_small_adapter_is_no_obstacle() -> None:
    images, labels = photos(32, [70])
    net = prepared(TINY, 32, lambda model: model)
    net = restricted(net, ("lora", "patch_embed", "pos_embed"), Lora(targets=("patch_embed.proj",)))
    observation = observe_net(net, TINY, images, labels)
    create_attack("patch_solve").check_model(net, observation.public)
    result = attack(observation, "patch_solve", lambda: copy.deepcopy(net))
    assert float(psnr(images, result.images)) > 60


def test_an_adapter_that_nobody_trains_is_told_before_a_round() -> None:
    net = adapted(32, 0.01)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name == "pos_embed")
    images, labels = photos(32, [70])
    public = observe_net(net, TINY, images, labels).public
    with pytest.raises(AttackError, match=r"lora_A.*which nobody trains"):
        create_attack("patch_solve").check_model(net, public)


@pytest.mark.parametrize(("rank", "moved"), [(8, 0.01), (32, 0.0)])
def test_an_adapter_that_shows_too_little_is_declined(rank: int, moved: float) -> None:
    images, labels = photos(32, [70])
    net = adapted(rank, moved)
    observation = observe_net(net, TINY, images, labels)
    with pytest.raises(AttackError, match=rf"adapter of rank {rank} shows"):
        attack(observation, "patch_solve", lambda: copy.deepcopy(net))


def test_positions_that_are_added_again_do_not_fit_and_that_is_told() -> None:
    images, labels = photos(32, [70])
    observation = observe(ModelSpec(name="tests.oddities:Everywhere"), images, labels)
    result = attack(observation, "patch_solve")
    assert float(psnr(images, result.images)) < 20
    assert any("do not fit" in note for note in result.notes)
