"""Factories: models by import path, from anybody's code."""

from __future__ import annotations

import pytest
import torch

from fedsim.core import factories
from fedsim.core.anatomy import Found, batchnorm_names, head_names, vit_parts
from fedsim.core.dissection import dissect
from fedsim.core.errors import FedsimError, ModelError
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec

SMALL = {"hidden_dim": 48, "num_layers": 2, "num_heads": 4, "mlp_dim": 64}


def build(name: str, side: int = 32, classes: int = 7, **options: object) -> torch.nn.Module:
    spec = ModelSpec(name=name, options=options)
    return build_model(spec, image_size=side, num_classes=classes, seed=0)


def test_a_factory_is_told_classes_and_size_where_it_takes_them() -> None:
    model = build("tests.tutorials:TutorialViT", side=16)
    assert vit_parts(model).grid == (2, 2)
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
    assert vit_parts(build("tests.tutorials:as_configured", side=16)).grid == (2, 2)
    assert vit_parts(build("tests.tutorials:HandWrittenViT", side=16)).grid == (2, 2)


def test_the_same_seed_gives_the_same_weights() -> None:
    once, again = (build("tests.tutorials:TutorialViT").state_dict() for _ in range(2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


def test_torchvisions_builders_are_factories() -> None:
    vit = build("torchvision.models:VisionTransformer", patch_size=16, **SMALL)
    parts = vit_parts(vit)
    assert (parts.patch_weight, parts.position) == ("conv_proj.weight", "encoder.pos_embedding")
    assert (parts.tokens, parts.prefix_tokens, len(parts.blocks)) == (4, 1, 2)
    resnet = build("torchvision.models:resnet18")
    assert head_names(resnet) == ["fc.weight", "fc.bias"]
    assert len(batchnorm_names(resnet)) == 20


def test_a_swin_of_torchvisions_has_patches_and_blocks_and_no_positions() -> None:
    parts = vit_parts(build("torchvision.models:swin_t", side=64))
    assert parts.position is None
    assert (parts.patch_weight, parts.grid) == ("features.0.0.weight", (16, 16))
    assert len(parts.blocks) == 12


def test_hugging_faces_classes_are_made_of_their_configuration() -> None:
    pytest.importorskip("transformers")
    model = build(
        "transformers:ViTForImageClassification",
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        patch_size=8,
    )  # fmt: skip
    parts = vit_parts(model)
    assert parts.position == "vit.embeddings.position_embeddings"
    assert (parts.grid, parts.prefix_tokens, len(parts.blocks)) == ((4, 4), 1, 2)
    assert parts.attention is not None
    assert len(parts.attention.weights) == 3
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)  # logits alone


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tests.tutorials:Net", {}, "tells 10 classes apart and the data has 7"),
        ("tests.tutorials:TutorialViT", {"depht": 2}, "could not be built"),
        ("tests.tutorials:of_no_use", {}, "no weights in the cupboard"),
        ("tests.tutorials:torch", {}, "builds nothing"),
        ("tests.tutorials:as_numbers", {}, "gives a list, not a torch model"),
        ("tests.tutorials:Nothing", {}, "cannot be imported"),
        ("nowhere.at_all:Net", {}, "cannot be imported"),
        ("torch.nn:Flatten", {}, "tells 3072 classes apart"),
    ],
)
def test_what_is_no_model_is_one_sentence(name: str, options: dict, words: str) -> None:
    with pytest.raises(FedsimError, match=words):
        build(name, **options)


def test_a_picture_that_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"does not take a picture of \(1, 3, 20, 20\)"):
        build("tests.tutorials:Net", side=20, classes=10)


def test_pretrained_is_for_timms_models() -> None:
    spec = ModelSpec(name="tests.tutorials:TutorialViT", pretrained=True)
    with pytest.raises(ModelError, match=r"model\.checkpoint"):
        build_model(spec, image_size=32, num_classes=7, seed=0)


def test_layers_that_wait_for_their_first_input_are_given_one() -> None:
    once, again = (build("tests.tutorials:Chain") for _ in range(2))
    assert torch.equal(once.state_dict()["seen.weight"], again.state_dict()["seen.weight"])
    assert head_names(once) == ["told.weight", "told.bias"]  # behind a softmax's logarithm


def test_a_tensor_of_two_names_has_one_in_the_state() -> None:
    model, other = (build("tests.tutorials:Shared") for _ in range(2))
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    assert not any(name.startswith("layers.1.") for name in state)
    other.load_state_dict(state)
    assert torch.equal(other.layers[1][0][0].weight, state["layers.0.0.0.weight"])


def test_a_head_that_only_helps_in_training_is_left_out_or_told() -> None:
    model = build("tests.tutorials:WithHelp").train()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(ModelError, match="gives in training a tuple, and no logits"):
        build("tests.tutorials:WithHelp", named=False)


def test_grey_pictures_are_one_sentence() -> None:
    with pytest.raises(ModelError, match="takes grey pictures, and those here have three"):
        build("tests.tutorials:Grey")
    assert head_names(build("tests.tutorials:Grey", in_channels=3)) == [
        "net.3.weight",
        "net.3.bias",
    ]


def test_a_setting_that_a_configuration_does_not_have_is_told() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="ViTConfig has no 'hiden_size'"):
        build("transformers:ViTForImageClassification", hiden_size=48)


def test_a_factory_is_dissected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[int] = []

    def counting(model: torch.nn.Module, side: int) -> Found:
        sides.append(side)
        return dissect(model, side)

    monkeypatch.setattr(factories, "dissect", counting)
    monkeypatch.setattr(factories, "_KNOWN", {})
    models = [build("tests.tutorials:TutorialViT", depth=1) for _ in range(3)]
    assert sides == [32]
    assert {vit_parts(model) for model in models} == {vit_parts(models[0])}
    build("tests.tutorials:TutorialViT", depth=2)
    build("tests.tutorials:TutorialViT", depth=1, side=16)
    assert sides == [32, 32, 16]


def test_logits_in_a_dictionary_or_a_dataclass_are_found() -> None:
    for odd in ("Dictionary", "Answers"):
        assert build(f"tests.oddities:{odd}")(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("Odd", "gives a dict, and no logits"),
        ("Two", "gives a tuple, and no logits"),
        ("Stateful", "keeps a dict in its state"),
        ("Waved", r"has complex numbers \('filter'\)"),
        ("Needy", "missing 1 required positional argument: 'width'"),
        ("OldWeightNorm", "cannot be copied"),
        ("Channelless", "takes grey pictures"),
    ],
)
def test_an_odd_model_that_does_not_fit_is_one_sentence(odd: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        build(f"tests.oddities:{odd}")
    assert "\n" not in str(error.value)
