"""The closed form on fixed positions: what it breaks, and by which rank it is stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.core.errors import AttackError
from fedsim.core.lora import Lora, Trainable
from fedsim.core.metrics import psnr
from fedsim.core.spec import ModelSpec
from fedsim.core.trainable import restricted
from fedsim.defenses.frozen_pe import FrozenPE
from fedsim.defenses.sinusoidal_pe import SinusoidalPE
from tests.staging import attack, observe, observe_net, photos, prepared

WIDE = ModelSpec(options={"patch_size": 8, "depth": 2})


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


@pytest.mark.parametrize("norm_first", [True, False])
def test_row_space_reads_the_first_attention_of_torchs_own_encoder(norm_first: bool) -> None:
    options = {"places": 0.5, "norm_first": norm_first}
    spec = ModelSpec(name="tests.tutorials:TutorialViT", options=options)
    images, labels = photos(32, [70])
    net = prepared(spec, 32, FrozenPE().prepare_model)
    observation = observe_net(net, spec, images, labels)
    result = attack(observation, "row_space", lambda: prepared(spec, 32, FrozenPE().prepare_model))
    assert float(psnr(images, result.images)) > 60


def test_row_space_stacks_layers_of_their_own_and_knows_fixed_tables() -> None:
    spec = ModelSpec(name="tests.tutorials:HandWrittenViT")
    images, labels = photos(32, [70])
    net = prepared(spec, 32, FrozenPE().prepare_model)
    observation = observe_net(net, spec, images, labels)
    assert "table.weight" not in observation.update.tensors
    result = attack(observation, "row_space", lambda: prepared(spec, 32, FrozenPE().prepare_model))
    assert float(psnr(images, result.images)) > 60


def test_row_space_counts_the_tokens_that_have_no_position() -> None:
    images, labels = photos(32, [70])
    observation = observe(ModelSpec(name="tests.oddities:RegistersFixed"), images, labels)
    assert "places" not in observation.update.tensors
    assert float(psnr(images, attack(observation, "row_space").images)) > 80
    registers = {"reg_tokens": 4, "no_embed_class": True}  # timm's own have none either
    narrow = ModelSpec(options={"patch_size": 8, "depth": 2, **registers})
    observation = observe(narrow, images, labels)
    assert float(psnr(images, attack(observation, "row_space").images)) > 35


@pytest.mark.parametrize("odd", ["WavesInForward", "Waves", "Scaled"])
def test_row_space_goes_by_what_a_model_adds_whoever_keeps_it(odd: str) -> None:
    images, labels = photos(16, [70])  # so few patches that waves are of full rank
    observation = observe(ModelSpec(name=f"tests.oddities:{odd}"), images, labels)
    result = attack(observation, "row_space")
    assert result.notes == []
    assert float(psnr(images, result.images)) > 60


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("PatchStem", "needs the positions that the model adds"),
        ("WideNorm", "needs layers of a first attention"),
        ("RootNorm", "needs layers of a first attention"),
        ("Einsum", "needs layers of a first attention"),
    ],
)
def test_row_space_says_which_part_an_odd_model_lacks(odd: str, words: str) -> None:
    images, labels = photos(32, [70])
    observation = observe(ModelSpec(name=f"tests.oddities:{odd}"), images, labels)
    with pytest.raises(AttackError, match=words):
        attack(observation, "row_space")


# -- a part of the model ----------------------------------------------------------------------

BROAD = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 384, "num_heads": 6})


def partly(spec: ModelSpec, trainable: Trainable, moved: float = 0.0, **lora: object) -> nn.Module:
    """A model of which a part is trained, its adapters ``moved`` from their zeros."""
    net = restricted(prepared(spec, 32, lambda model: model), trainable, Lora(**lora))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=moved, generator=torch.Generator().manual_seed(0))
    return net


@pytest.mark.parametrize(
    ("spec", "trainable", "moved", "lora"),
    [
        (BROAD, "blocks.0", 0.0, {}),  # the patch projection is not trained, nor are positions
        (BROAD, "lora", 0.01, {"r": 32}),  # adapters alone, after the first round
        (WIDE, ("lora", "patch_embed"), 0.0, {"r": 64}),  # before it, with the projection
    ],
)
def test_a_part_of_the_first_block_is_enough(
    spec: ModelSpec, trainable: Trainable, moved: float, lora: dict
) -> None:
    images, labels = photos(32, [70])
    net = partly(spec, trainable, moved, **lora)
    observation = observe_net(net, spec, images, labels)
    assert "blocks.0.norm1.bias" not in observation.update.tensors or trainable == "blocks.0"
    result = attack(observation, "row_space", lambda: partly(spec, trainable, moved, **lora))
    assert float(psnr(images, result.images)) > 40


@pytest.mark.parametrize(
    ("spec", "trainable", "moved", "lora"),
    [
        (WIDE, "blocks.0", 0.0, {}),  # too narrow to do without the projection's gradient
        (BROAD, "lora", 0.01, {"r": 8}),  # fewer rows than tokens
        (BROAD, "lora", 0.0, {"r": 32}),  # at zero, adapters show too few columns
        (BROAD, "head", 0.0, {}),
    ],
)
def test_what_shows_too_little_is_declined_by_the_name_of_what_is_missing(
    spec: ModelSpec, trainable: Trainable, moved: float, lora: dict
) -> None:
    images, labels = photos(32, [70])
    net = partly(spec, trainable, moved, **lora)
    observation = observe_net(net, spec, images, labels)
    with pytest.raises(AttackError, match=r"needs the gradient of patch_embed\.proj\.weight"):
        attack(observation, "row_space", lambda: partly(spec, trainable, moved, **lora))
