"""Which parameters clients train: words, patterns, adapters, and models of anybody's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedsim.core.anatomy import head_names, vit_parts
from fedsim.core.errors import ModelError
from fedsim.core.lora import Lora
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.core.trainable import adapted_layers, choose, named_part, restricted
from tests.tutorials import HandWrittenViT

TINY = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3})
SMALL = {"patch_size": 8, "hidden_dim": 48, "num_layers": 2, "num_heads": 4, "mlp_dim": 64}
TORCHVISION = ModelSpec(name="torchvision.models:VisionTransformer", options=SMALL)


def net(spec: ModelSpec = TINY) -> nn.Module:
    return build_model(spec, image_size=32, num_classes=5, seed=0)


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def adapted_by_peft(num_classes: int = 5, image_size: int = 32) -> nn.Module:
    """As people write it: peft's own wrapper around a network, the head saved beside it."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["to_q", "to_kv"], modules_to_save=["head"])
    return get_peft_model(HandWrittenViT(num_classes, image_size), settings)


def test_the_head_alone() -> None:
    assert trained(restricted(net(), "head")) == ["head.weight", "head.bias"]
    assert trained(restricted(net(TORCHVISION), "head")) == ["heads.head.weight", "heads.head.bias"]


def test_norms_and_biases_are_found_by_what_they_are() -> None:
    norms = trained(restricted(net(TORCHVISION), "norm"))
    assert len(norms) == 10
    assert all("ln" in name for name in norms)
    biases = trained(restricted(net(), "bias"))
    assert all(name.endswith("bias") for name in biases)
    assert "patch_embed.proj.bias" in biases


def test_a_pattern_is_a_part_of_a_name_or_has_wildcards() -> None:
    chosen = choose(net(), ("patch_embed", "pos_embed"))
    assert chosen == ["pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert choose(net(), "blocks.?.attn.qkv.weight") == [
        "blocks.0.attn.qkv.weight",
        "blocks.1.attn.qkv.weight",
    ]
    with pytest.raises(ModelError, match=r"no parameters 'heads' \(did you mean 'head'"):
        choose(net(), "heads")


def test_what_a_defense_froze_stays_frozen() -> None:
    model = net()
    model.pos_embed.requires_grad_(False)
    assert "pos_embed" not in trained(restricted(model, ("patch_embed", "pos_embed")))
    frozen = net()
    frozen.pos_embed.requires_grad_(False)
    with pytest.raises(ModelError, match="leave nothing of pos_embed"):
        restricted(frozen, "pos_embed")


def test_adapters_change_nothing_at_first_and_everything_can_be_found() -> None:
    plain, images = net(), torch.rand(2, 3, 32, 32)
    adapted = restricted(copy.deepcopy(plain), "lora", Lora(r=4))
    assert torch.allclose(plain.eval()(images), adapted.eval()(images))
    assert all("lora_" in name for name in trained(adapted))
    assert sorted({n.split(".lora_")[0] for n in trained(adapted)}) == sorted(
        f"blocks.{block}.{layer}"
        for block in (0, 1)
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    )
    parts = vit_parts(adapted)
    assert parts.attention is not None
    assert parts.attention.weights == ("blocks.0.attn.qkv.base_layer.weight",)
    assert head_names(adapted) == head_names(plain)


def test_the_same_seed_begins_adapters_alike() -> None:
    one, other, third = (restricted(net(), "lora", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, third[name]) for name, tensor in one.items())


def test_the_projection_may_have_an_adapter_too() -> None:
    model = restricted(net(), ("lora", "head"), Lora(r=4, targets=("patch_embed.proj",)))
    assert list(adapted_layers(model)) == ["patch_embed.proj"]
    assert vit_parts(model).patch_weight == "patch_embed.proj.base_layer.weight"
    assert trained(model)[-2:] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("name", ["HandWrittenViT", "TutorialViT"])
def test_what_was_found_in_a_model_of_somebodys_own_is_found_behind_adapters(name: str) -> None:
    spec = ModelSpec(name=f"tests.tutorials:{name}")
    plain, adapted = vit_parts(net(spec)), restricted(net(spec), "lora")
    parts = vit_parts(adapted)
    assert parts.position == plain.position
    assert all(name in dict(adapted.named_parameters()) for name in parts.attention.weights)
    images = torch.rand(2, 3, 32, 32)
    moved = copy.deepcopy(adapted).eval()
    with torch.no_grad():
        for parameter in (p for n, p in moved.named_parameters() if "lora_B" in n):
            parameter.normal_()
        assert not torch.allclose(adapted.eval()(images), moved(images))  # in eval mode as well


def test_a_model_that_came_with_adapters_of_its_own_is_dissected() -> None:
    spec = ModelSpec(name=f"{__name__}:adapted_by_peft")
    model = net(spec)
    parts = vit_parts(model)
    weights = dict(model.named_parameters())
    assert parts.patch_weight in weights
    assert parts.position in weights
    assert parts.attention is not None
    assert [n.split(".")[-3] for n in parts.attention.weights] == ["to_q", "to_kv"]
    assert head_names(model)[0].endswith("head.modules_to_save.default.weight")
    assert set(head_names(model)) < set(trained(restricted(model, "all")))
    with pytest.raises(ModelError, match="adapters of its own"):
        restricted(net(spec), "lora")


def test_layers_that_no_adapter_fits_are_told() -> None:
    with pytest.raises(ModelError, match="no blocks of a transformer"):
        restricted(net(ModelSpec(name="resnet18")), "lora")
    with pytest.raises(ModelError, match=r"no linear layer or convolution 'qvk'"):
        restricted(net(), "lora", Lora(targets=("qvk",)))


def test_a_part_is_named_by_as_few_words_as_modules_allow() -> None:
    model = net()
    head = choose(model, "head")
    assert named_part(model, head) == ("head",)
    block = choose(model, "blocks.0")
    assert named_part(model, [*block, "pos_embed"]) == ("pos_embed", "blocks.0.*")
    assert named_part(model, ["no_such"]) is None


def test_names_that_end_alike_are_told_apart_or_not_named_at_all() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model.inner = nn.Module()
    model.inner.weight = nn.Parameter(torch.zeros(2))
    assert named_part(model, ["inner.weight"]) == ("inner.*",)
    assert named_part(model, ["weight"]) is None
