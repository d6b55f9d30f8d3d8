"""Dissection: the parts of anybody's network, found by watching a picture pass."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from fedsim.core.anatomy import (
    FirstAttention,
    blocks_of,
    found_in,
    head_names,
    tensor_of,
    vit_parts,
)
from fedsim.core.dissection import added, dissect
from fedsim.core.errors import ModelError
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from tests import oddities
from tests.tutorials import Chain, HandWrittenViT, Net, TutorialViT, TwoHeads


def test_a_vit_with_patches_cut_by_hand_is_taken_apart() -> None:
    found = dissect(TutorialViT(), 32)
    assert found.head == ("to_logits.weight", "to_logits.bias")  # not the last that was written
    parts = found.vit
    assert parts is not None
    assert (parts.patch_weight, parts.patch_bias) == ("embed.weight", "embed.bias")
    assert (parts.position, parts.prefix_tokens, parts.cls_token) == ("where", 1, "first")
    assert (parts.grid, parts.patch_size) == ((4, 4), (8, 8))
    assert parts.blocks == ("body.layers.0", "body.layers.1")
    attention = "body.layers.0.self_attn.in_proj_"
    assert parts.attention == FirstAttention(
        "body.layers.0.norm1", (f"{attention}weight",), (f"{attention}bias",)
    )


def test_the_order_in_which_a_patch_is_read_is_found() -> None:
    parts = dissect(TutorialViT(), 32).vit
    assert parts is not None
    assert parts.layout is not None
    assert parts.layout[:4] == (0, 64, 128, 1)  # colours last: red, green, blue of the first pixel


def test_norms_behind_and_tokens_first_are_seen() -> None:
    parts = dissect(TutorialViT(norm_first=False, batch_first=False), 32).vit
    assert parts is not None
    assert parts.position == "where"
    assert parts.attention is not None
    assert parts.attention.norm is None


def test_a_vit_of_lists_with_a_table_of_positions_is_taken_apart() -> None:
    parts = dissect(HandWrittenViT(), 32).vit
    assert parts is not None
    assert (parts.patch_weight, parts.position) == ("stem.0.weight", "table.weight")
    assert (parts.prefix_tokens, parts.cls_token, parts.layout) == (0, None, None)
    assert parts.blocks == ("layers.0", "layers.1")
    assert parts.attention is not None
    assert parts.attention.norm == "layers.0.0.0"
    assert parts.attention.weights == ("layers.0.0.1.to_q.weight", "layers.0.0.1.to_kv.weight")


def test_what_was_found_agrees_with_what_timm_names() -> None:
    options = {"patch_size": 8, "depth": 2, "embed_dim": 96}
    model = build_model(ModelSpec(options=options), image_size=32, num_classes=5, seed=0)
    found = dissect(model, 32)
    assert found.vit == vit_parts(model)
    assert list(found.head or ()) == head_names(model)
    assert blocks_of(model) == vit_parts(model).blocks


def test_a_cnn_is_no_vit_and_has_a_head() -> None:
    found = dissect(Net(), 32)
    assert found.head == ("fc3.weight", "fc3.bias")
    assert found.vit is None
    assert "no layer that reads patches" in found.why


def test_the_model_is_left_as_it_was() -> None:
    model = TutorialViT().train()
    before = copy.deepcopy(model.state_dict())
    coin = torch.random.get_rng_state()
    dissect(model, 32)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(coin, torch.random.get_rng_state())


def test_positions_behind_a_norm_are_not_taken_for_what_is_added_to_patches() -> None:
    class Normed(HandWrittenViT):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.LayerNorm(48)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = self.before(self.stem(images).transpose(1, 2)) + self.table.weight
            return self.head(self.norm(tokens).mean(1))

    parts = dissect(Normed(), 32).vit
    assert parts is not None
    assert parts.position is None  # its gradient is not that of what the projection gave


def test_a_model_without_logits_is_told() -> None:
    with pytest.raises(ModelError, match="no logits"):
        dissect(nn.Conv2d(3, 8, 3), 32)


def test_copies_of_a_model_remember_what_was_found() -> None:
    spec = ModelSpec(name="tests.tutorials:TutorialViT")
    model = build_model(spec, image_size=32, num_classes=7, seed=0)
    assert found_in(copy.deepcopy(model)) == found_in(model)
    assert vit_parts(copy.deepcopy(model)).position == "where"


def test_a_model_of_two_heads_has_its_other_parts() -> None:
    found = dissect(TwoHeads(), 32)
    assert found.head is None
    assert found.vit is not None
    assert (found.vit.head_weight, found.vit.position) == (None, "table.weight")


def test_coins_that_are_tossed_in_training_are_seen() -> None:
    side = torch.zeros(1, 3, 32, 32)
    for drop, tosses in ((0.0, False), (0.5, True)):
        model = Chain(drop=drop)
        model(side)
        assert dissect(model, 32).tosses is tosses


@pytest.mark.parametrize(
    ("odd", "position", "before", "length"),
    [
        (oddities.Registers, "places", 0, 21),
        (oddities.Long, "places", 1, 17),
        (oddities.Waves, "pe", 1, 17),
        (oddities.TokenLast, "places", 0, 17),
        (oddities.Grid, "places", 0, 16),
        (oddities.InPlace, "places", 1, 16),
        (oddities.RootNorm, "places", 1, 17),
        (oddities.Scaled, "places", 1, 17),
        (oddities.TwoAxes, None, 0, 16),
        (oddities.WavesInForward, None, 0, 16),
    ],
)
def test_positions_are_found_wherever_they_are_kept(
    odd: type[oddities.Plain], position: str | None, before: int, length: int
) -> None:
    torch.manual_seed(0)
    model = odd(image_size=32)
    parts = dissect(model, 32).vit
    assert parts is not None
    assert (parts.position, parts.prefix_tokens, parts.sequence) == (position, before, length)
    measured = added(model, 32)
    assert measured is not None
    assert measured.positions.any()
    if position is None:
        assert parts.measurable
    else:
        rows = parts.rows_of(tensor_of(model, position))
        assert torch.allclose(rows.double(), measured.positions, atol=1e-4)


def test_a_gain_is_measured_with_the_weights_that_are_there() -> None:
    torch.manual_seed(0)
    model = oddities.Gained()
    parts = dissect(model, 32).vit
    assert parts is not None
    assert parts.gained
    with torch.no_grad():
        model.gain.fill_(3.0)
    measured = added(model, 32)
    assert measured is not None
    assert measured.gain == pytest.approx(3.0)


def test_what_is_more_than_a_product_and_a_sum_is_not_measured() -> None:
    assert added(oddities.PatchStem(), 32) is None
    assert added(oddities.Columns(), 32) is None
    assert added(TutorialViT(places=0.1).eval(), 32) is not None


@pytest.mark.parametrize(
    ("odd", "head"),
    [
        (oddities.TiedHead, ("asked", "out.bias")),
        (oddities.TiedElsewhere, ("alias", "out.bias")),
        (oddities.TwoHeadedCnn, ("kopf.weight", "kopf.bias")),
        (oddities.HeadWithoutBias, ("out.weight", None)),
        (oddities.WeightNormed, None),  # whose gradient nobody uploads
        (oddities.CentredLogits, None),
        (oddities.Cold, None),
        (oddities.ColdInPlace, None),
        (oddities.Probabilities, None),
        (oddities.Cosine, None),
        (oddities.ConvHead, None),
    ],
)
def test_a_head_is_what_gives_the_logits_by_the_name_that_is_uploaded(
    odd: type[torch.nn.Module], head: tuple[str, str | None] | None
) -> None:
    model = odd()
    assert dissect(model, 32).head == head
    if head is not None:
        assert head[0] in dict(model.named_parameters())


def test_patches_read_by_weights_that_are_computed_are_told() -> None:
    found = dissect(oddities.NormedPatches(), 32)
    assert found.vit is None
    assert "made of other parameters" in found.why


def test_a_norm_over_all_tokens_is_none_of_each() -> None:
    parts = dissect(oddities.WideNorm(), 32).vit
    assert parts is not None
    assert parts.attention is None


@pytest.mark.parametrize("odd", ["LayerDrop", "SeldomDrop", "PythonsCoin"])
def test_coins_that_seldom_show_or_are_one_for_all_are_seen(odd: str) -> None:
    state = random.getstate()
    assert dissect(getattr(oddities, odd)(), 32).tosses
    assert random.getstate() == state
    assert not dissect(oddities.Plain(), 32).tosses
