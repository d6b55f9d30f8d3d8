"""Selection: which layers an attack looks at, by component and by block."""

from __future__ import annotations

import pytest
from torch import nn

from fedsim.attacks.matching.layers import part_of, select
from fedsim.core.errors import AttackError
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec

VIT = ModelSpec(options={"patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3})


def vit() -> nn.Module:
    return build_model(VIT, image_size=32, num_classes=8, seed=0)


def test_every_parameter_of_a_vit_has_its_part_and_block() -> None:
    parts = part_of(vit())
    assert parts["pos_embed"] == ("embeddings", None)
    assert parts["patch_embed.proj.weight"] == ("embeddings", None)
    assert parts["blocks.0.attn.qkv.weight"] == ("attention", 1)
    assert parts["blocks.2.mlp.fc1.bias"] == ("mlp", 3)
    assert parts["blocks.1.norm1.weight"] == ("norm", 2)
    assert parts["norm.weight"] == ("norm", None)
    assert parts["head.weight"] == ("head", None)
    assert not [name for name, (part, _) in parts.items() if part == "other"]


def test_a_convolutional_network_has_stages() -> None:
    spec = ModelSpec(name="resnet18", options={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]})
    parts = part_of(build_model(spec, image_size=32, num_classes=8, seed=0))
    assert parts["conv1.weight"] == ("other", 1)
    assert parts["layer1.0.conv1.weight"] == ("other", 3)
    assert parts["fc.weight"][0] == "head"


def test_layers_are_selected() -> None:
    model = vit()
    names = [name for name, _ in model.named_parameters()]
    attention = select(model, names, parts=["attention"], blocks=(2, 3))
    assert {name.split(".")[1] for name in attention} == {"1", "2"}
    assert all(".attn." in name for name in attention)
    assert select(model, names) == names
    rest = select(model, names, without_blocks=(2, 3))
    assert {name.split(".")[1] for name in rest if name.startswith("blocks")} == {"0"}
    assert {"pos_embed", "head.weight", "patch_embed.proj.weight"} <= set(rest)
    assert set(names) - set(select(model, names, without=["mlp"])) == {
        name for name in names if ".mlp." in name
    }
    with pytest.raises(AttackError, match="no layer"):
        select(model, ["pos_embed"], parts=["mlp"])
    with pytest.raises(AttackError, match="does not have"):
        select(model, ["strange"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"without_blocks": (9, 12)}, "counted from 1, of 3; not 9 to 12"),
        ({"blocks": (2, 1)}, "not 2 to 1"),
        ({"without_blocks": (0, 1)}, "not 0 to 1"),
        ({"without": ["other"]}, "no layers of the part 'other'"),
    ],
)
def test_a_selection_of_what_the_model_does_not_have_is_refused(options: dict, words: str) -> None:
    model = vit()
    with pytest.raises(AttackError, match=words):
        select(model, [name for name, _ in model.named_parameters()], **options)


def test_the_blocks_of_all_stages_of_a_swin_are_counted() -> None:
    options = {"window_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2]}
    spec = ModelSpec(name="swin_tiny_patch4_window7_224", options=options)
    model = build_model(spec, image_size=32, num_classes=8, seed=0)
    names = [name for name, _ in model.named_parameters()]
    left_out = set(names) - set(select(model, names, without_blocks=(3, 4)))
    assert left_out
    assert all(name.startswith("layers.1.blocks") for name in left_out)
    kept = select(model, names, without=["attention", "mlp"])
    assert not [name for name in kept if ".attn." in name or ".mlp." in name]


def test_parameters_of_somebodys_own_are_told_by_how_they_are_built() -> None:
    spec = ModelSpec(name="tests.tutorials:HandWrittenViT")
    parts = part_of(build_model(spec, image_size=32, num_classes=8, seed=0))
    assert parts["stem.0.weight"] == parts["table.weight"] == ("embeddings", None)
    assert parts["layers.0.0.0.weight"] == ("norm", 1)
    assert parts["layers.1.0.1.to_q.weight"] == ("attention", 2)
    assert parts["layers.1.0.1.out.bias"] == ("attention", 2)
    assert parts["layers.1.1.1.weight"] == ("mlp", 2)
    assert parts["norm.weight"] == ("norm", None)
    assert parts["head.bias"] == ("head", None)


def test_parts_of_torchs_own_encoder_are_told_apart() -> None:
    spec = ModelSpec(name="tests.tutorials:TutorialViT")
    model = build_model(spec, image_size=32, num_classes=8, seed=0)
    names = [name for name, _ in model.named_parameters()]
    block = "body.layers.1."
    assert select(model, names, parts=["attention"], blocks=(2, 2)) == [
        f"{block}self_attn.{name}"
        for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    ]
    assert f"{block}linear1.weight" in select(model, names, parts=["mlp"])
