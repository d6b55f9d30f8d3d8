"""Models: any timm classifier by name, its parts found by type and name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from fedsim.core.anatomy import resnet_parts, vit_parts
from fedsim.core.errors import ModelError
from fedsim.core.models import OPENING, build_model, load_checkpoint
from fedsim.core.spec import ModelSpec

TINY = {"patch_size": 8, "depth": 2, "embed_dim": 96}


def build(
    name: str = "vit_tiny_patch16_224", options: dict | None = None, seed: int = 0,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model, **more,
):  # fmt: skip
    spec = ModelSpec(name=name, options=TINY if options is None else options, **more)
    return build_model(spec, image_size=32, num_classes=5, seed=seed, prepare=prepare)


def test_the_parts_of_a_vit_are_found() -> None:
    parts = vit_parts(build())
    assert (parts.patch_weight, parts.position) == ("patch_embed.proj.weight", "pos_embed")
    assert (parts.tokens, parts.prefix_tokens, len(parts.blocks)) == (16, 1, 2)
    assert (parts.head_weight, parts.head_bias) == ("head.weight", "head.bias")


def test_a_model_can_begin_as_older_vits_did() -> None:
    classic, again, plain = build(init="classic"), build(init="classic"), build()
    assert 0.9 < float(classic.pos_embed.std()) < 1.1
    assert float(plain.pos_embed.std()) < 0.03
    weight = classic.get_parameter("blocks.0.mlp.fc1.weight")
    bound = weight.shape[1] ** -0.5  # torch's default of a linear layer
    assert 0.95 * bound < float(weight.abs().max()) <= bound
    assert torch.equal(classic.pos_embed, again.pos_embed)
    assert not torch.equal(classic.pos_embed, build(init="classic", seed=1).pos_embed)
    with pytest.raises(ValidationError, match="classic"):
        build(init="classic", pretrained=True)


def test_a_vit_without_class_token_has_no_prefix() -> None:
    options = {**TINY, "class_token": False, "global_pool": "avg"}
    parts = vit_parts(build(options=options))
    assert parts.prefix_tokens == 0
    assert parts.cls_token is None


def test_the_parts_of_a_resnet_are_found() -> None:
    parts = resnet_parts(build("resnet18", {}))
    assert len(parts.batchnorms) == 20
    assert parts.head_weight == "fc.weight"


def test_a_resnet_is_no_vit() -> None:
    with pytest.raises(ModelError, match="no ViT"):
        vit_parts(build("resnet18", {}))


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = build(), build(), build(seed=1)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert torch.equal(state, torch.get_rng_state())


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean 'vit_tiny_patch16_224'"):
        build("vit_tny_patch16_224")


def test_an_unknown_option_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="wings"):
        build(options={"wings": 2})


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_checkpoint_is_loaded(tmp_path: Path, suffix: str) -> None:
    trained, path = build(seed=9), tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": trained.state_dict()}, path)
    else:
        save_file(trained.state_dict(), path)
    loaded = build(checkpoint=str(path))
    assert torch.equal(loaded.head.weight, trained.head.weight)


def test_a_head_for_other_classes_is_left_out_and_named(tmp_path: Path) -> None:
    state = build(seed=9).state_dict()
    state["head.weight"], state["head.bias"] = torch.zeros(7, 96), torch.zeros(7)
    save_file(state, tmp_path / "w.safetensors")
    assert load_checkpoint(build(), tmp_path / "w.safetensors") == ["head.weight", "head.bias"]


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_file({"foo": torch.zeros(1)}, tmp_path / "w.safetensors")
    (tmp_path / "text.pth").write_text("not weights")
    for path, expected in [
        ("w.safetensors", "does not fit"),
        ("text.pth", "cannot be read"),
        ("absent.pth", "no checkpoint"),
    ]:
        with pytest.raises(ModelError, match=expected):
            load_checkpoint(build(), tmp_path / path)


def test_a_checkpoint_may_hold_what_a_defense_adds(tmp_path: Path) -> None:
    def widened(model: nn.Module) -> nn.Module:
        scale = float(model.get_parameter("pos_embed").detach().mean())
        model.register_parameter("extra", nn.Parameter(torch.full((3,), scale)))
        return model

    plain, path = build(seed=9), tmp_path / "w.safetensors"
    save_file(plain.state_dict(), path)
    begun = build(checkpoint=str(path), prepare=widened)  # it goes by the positions of the file
    assert float(begun.extra[0].detach()) == float(plain.pos_embed.detach().mean())
    save_file({**plain.state_dict(), "extra": torch.arange(3.0)}, path)
    assert build(checkpoint=str(path), prepare=widened).extra.tolist() == [0, 1, 2]
    with pytest.raises(ModelError, match="unknown: extra"):
        build(checkpoint=str(path))


def test_pretrained_weights_out_of_reach_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("timm.create_model", no_network)
    with pytest.raises(ModelError, match=r"model\.checkpoint"):
        build(pretrained=True)


@pytest.mark.parametrize("name", OPENING)
def test_options_open_no_files_of_their_own(name: str, tmp_path: Path) -> None:
    spec = ModelSpec(options={name: str(tmp_path / "weights.pth")})
    with pytest.raises(ModelError, match=f"model.options has '{name}'; use model.checkpoint"):
        build_model(spec, image_size=32, num_classes=8, seed=0)


@pytest.mark.parametrize("name", ["device", "dtype"])
def test_options_do_not_say_where_and_in_what_numbers_clients_train(name: str) -> None:
    spec = ModelSpec(name="vit_tiny_patch16_224", options={name: "meta"})
    with pytest.raises(ModelError, match=f"model.options has '{name}'"):
        build_model(spec, image_size=32, num_classes=4, seed=0)
