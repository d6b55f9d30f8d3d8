"""WeightCheck: marks of tampering fire, initialisations of every kind do not."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import ModelSpec, PriorSpec
from fedsim.defenses.guards.weight_check import WeightCheck, one_direction, twins
from tests.defenses.conftest import pictures
from tests.defenses.guards.conftest import fish, scene_of


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 3}),
        ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 2, "init_values": 1e-5}),
        ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 2, "weight_init": "jax"}),
        ("resnet18", {"zero_init_last": True}),
        ("efficientnet_lite0", {}),
        ("mixer_s32_224", {}),  # whose head begins as zeros
        ("convnet", {}),
    ],
)
def test_an_honest_beginning_is_no_sign(name: str, options: dict) -> None:
    model = build_model(ModelSpec(name=name, options=options), image_size=32, num_classes=5, seed=0)
    finding = WeightCheck().inspect(scene_of(model))
    assert not finding.fired, finding.words


def test_pretrained_weights_with_dead_and_with_similar_filters_are_no_sign() -> None:
    model = copy.deepcopy(load_prior(PriorSpec()).model).requires_grad_(True)
    finding = WeightCheck().inspect(scene_of(model, round_=3))
    assert not finding.fired, finding.words
    marks = [mark.words for mark in WeightCheck().marks(scene_of(model))]
    assert any(words.startswith("4 of 32 rows") for words in marks)  # zeros that training left


def test_honest_rounds_are_no_sign(vit) -> None:
    guard, kept = WeightCheck(), {}
    for round_ in range(1, 4):
        scene = scene_of(vit, 4, round_, kept=kept)
        finding = guard.inspect(scene)
        assert not finding.fired, finding.words
        kept = guard.keep(scene)
        update = local_update(vit, pictures(4), Protocol())
        with torch.no_grad():
            for name, parameter in vit.named_parameters():
                parameter -= 0.1 * update.tensors[name]


@pytest.mark.parametrize(
    ("spoil", "mark"),
    [
        (lambda m: fish(m, 1), "head"),
        (lambda m: fish(m, 1, gap=3), "head.weight"),
        (lambda m: m.head.bias[0].sub_(1000), "head.bias"),
        (lambda m: m.head.weight[0].mul_(1000), "head.weight"),
        (lambda m: m.head.weight[1:].copy_(m.head.weight[:1].expand(4, -1)), "head.weight"),
        (lambda m: m.patch_embed.proj.weight[-20:].zero_(), "patch_embed.proj.weight"),
        (lambda m: m.blocks[0].attn.proj.weight.zero_(), "attn.proj.weight"),
        (lambda m: m.blocks[1].norm2.weight.mul_(1e5), "norm2.weight"),
        (lambda m: m.blocks[1].mlp.fc2.weight.mul_(1e-8), "mlp.fc2.weight"),
        (
            lambda m: m.blocks[1].mlp.fc1.weight.copy_(
                m.blocks[1].mlp.fc1.weight[:1].expand_as(m.blocks[1].mlp.fc1.weight)
            ),
            "blocks.1.mlp.fc1.weight",
        ),
        (lambda m: m.blocks[0].mlp.fc1.weight[0, 0].fill_(math.inf), "no number"),
    ],
)
def test_a_mark_of_tampering_fires_in_the_first_round_and_is_named(vit, spoil, mark: str) -> None:
    with torch.no_grad():
        spoil(vit)
    finding = WeightCheck().inspect(scene_of(vit))
    assert finding.fired
    assert mark in finding.words


def test_a_head_of_zeros_fires_once_another_was_seen(vit) -> None:
    before = WeightCheck().keep(scene_of(vit))
    nn.init.zeros_(vit.head.weight)
    assert not WeightCheck().inspect(scene_of(vit, round_=1)).fired
    assert WeightCheck(zero_start=False).inspect(scene_of(vit, round_=1)).fired
    still = WeightCheck().keep(scene_of(vit))  # a round of training would have moved it
    assert WeightCheck().inspect(replace(scene_of(vit, round_=2), kept=still)).fired
    finding = WeightCheck().inspect(replace(scene_of(vit, round_=2), kept=before))
    assert finding.fired
    assert "'head.weight' is all zeros" in finding.words


def test_a_head_that_fell_or_a_tensor_that_leapt_is_noticed_by_what_was_kept(vit) -> None:
    guard = WeightCheck()
    scene = scene_of(vit, round_=2, kept=guard.keep(scene_of(vit)))
    assert not guard.inspect(scene).fired
    with torch.no_grad():
        vit.head.weight.mul_(1e-3)
    assert "fell to" in guard.inspect(scene).words
    assert guard.inspect(scene).fired
    assert not guard.inspect(replace(scene, kept={})).fired
    with torch.no_grad():
        vit.head.weight.mul_(1e3)
        vit.pos_embed.add_(50)
    assert "'pos_embed' moved" in guard.inspect(scene).words
    assert guard.inspect(scene).fired


def test_what_is_kept_is_small(vit) -> None:
    kept = WeightCheck().keep(scene_of(vit))
    assert all(name.startswith("weight_check/") for name in kept)
    assert sum(t.numel() for t in kept.values()) == 65 * len(list(vit.parameters())) + 1


def test_what_nobody_trains_is_looked_at_and_may_not_move(vit) -> None:
    vit.head.requires_grad_(False)
    before = WeightCheck().keep(scene_of(vit))
    assert not WeightCheck().inspect(scene_of(vit, round_=2, kept=before)).fired
    with torch.no_grad():
        vit.head.weight[0] += 1e-3
    finding = WeightCheck().inspect(scene_of(vit, round_=2, kept=before))
    assert finding.fired
    assert "'head.weight' moved, which nobody trains" in finding.words
    with torch.no_grad():  # a head that fishes, in the first round already
        vit.head.weight.zero_()
        vit.head.weight[1] = torch.randn(vit.head.weight.shape[1])
    assert WeightCheck().inspect(scene_of(vit)).fired


def test_tensors_may_move_further_the_longer_ago_a_quiet_round_is(vit) -> None:
    guard = WeightCheck()
    kept = guard.keep(scene_of(vit, round_=1))
    with torch.no_grad():
        vit.pos_embed.add_(2.0)
    near = guard.inspect(scene_of(vit, round_=2, kept=kept))
    far = guard.inspect(scene_of(vit, round_=11, kept=kept))
    assert near.fired
    assert near.score == pytest.approx(10 * far.score)


def test_what_batchnorm_scales_may_go_far() -> None:
    model = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=8, seed=0)
    guard = WeightCheck()
    kept = guard.keep(scene_of(model))
    with torch.no_grad():
        model.bn1.bias.add_(9.0)
        model.layer1[0].conv1.weight.mul_(50.0)
    assert not guard.inspect(scene_of(model, round_=2, kept=kept)).fired


def test_twins_are_found_among_many_rows_whatever_their_sign() -> None:
    coin = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 64, generator=coin)
    rows[7], rows[300] = rows[100], -2 * rows[200]
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert twins(rows) == pytest.approx(4 / 500)


def test_one_direction_is_the_share_of_the_largest_singular_value() -> None:
    coin = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 20, generator=coin) + 1
    rows = rows / rows.norm(dim=1, keepdim=True)
    expected = float(torch.linalg.svdvals(rows)[0] ** 2 / 40)
    assert one_direction(rows) == pytest.approx(expected, rel=1e-3)
