"""Checkpoints of generators: made afresh, kept, read again, and refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim.attacks.generators import (
    check_generator,
    create_generator,
    generate,
    generator_metadata,
    latents_of,
    load_generator,
    save_generator,
)
from fedsim.core.errors import ModelError
from fedsim.core.files import save_tensors
from fedsim.core.spec import GeneratorSpec
from tests.attacks.generators.conftest import SMALL
from tests.strangers import invite


class Plain(nn.Module):
    """A stranger's generator: no `latents`, no labels."""

    latent_size = 5

    def __init__(self, side: int = 16):
        super().__init__()
        self.side, self.layer = side, nn.Linear(5, side * side)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.layer(z)).view(-1, 1, self.side, self.side)


class Loud(Plain):
    """One whose pixels leave the range."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(z)


@pytest.mark.parametrize("name", ["dcgan", "stylegan"])
def test_a_seed_gives_the_same_generator_and_leaves_the_callers_dice_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (create_generator(name, SMALL, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    z = torch.randn(1, 8)
    assert torch.equal(generate(one, latents_of(one, z)), generate(two, latents_of(two, z)))
    assert not torch.equal(generate(one, latents_of(one, z)), generate(other, latents_of(other, z)))


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    path, options = tmp_path / "g.safetensors", {"image_size": 16, **SMALL}
    net = create_generator("dcgan", options, seed=3)
    save_generator(path, "dcgan", options, net, trained_on={"name": "photos", "path": None})
    again = load_generator(GeneratorSpec(checkpoint=str(path)), image_size=16)
    z = torch.randn(2, 8)
    assert torch.equal(generate(net, z), generate(again, z))
    assert not any(p.requires_grad for p in again.parameters())
    assert generator_metadata(path)["trained_on"] == {"name": "photos", "path": None}


def test_a_class_of_ones_own_needs_only_an_import_path_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    save_file(Plain().state_dict(), path)
    spec = GeneratorSpec(checkpoint=str(path), name=f"{__name__}:Plain")
    net = load_generator(spec, image_size=16)
    assert generate(net, torch.randn(2, 5)).shape == (2, 3, 16, 16)


def test_bad_generators_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "g.safetensors"
    net = create_generator("dcgan", {"image_size": 16, **SMALL})
    save_generator(path, "dcgan", {"image_size": 16, **SMALL}, net)
    with pytest.raises(ModelError, match="images of 16 pixels and the clients' have 32"):
        load_generator(GeneratorSpec(checkpoint=str(path)), image_size=32)
    with pytest.raises(ModelError, match=r"does not fit.*differs"):
        load_generator(GeneratorSpec(checkpoint=str(path), options={"width": 5}), image_size=16)
    with pytest.raises(ModelError, match="holds a dcgan, not a stylegan"):
        load_generator(GeneratorSpec(checkpoint=str(path), name="stylegan"), image_size=16)
    with pytest.raises(ModelError, match="there is no generator file"):
        load_generator(GeneratorSpec(checkpoint=str(tmp_path / "no")), image_size=16)
    (tmp_path / "bad").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="not a safetensors checkpoint"):
        load_generator(GeneratorSpec(checkpoint=str(tmp_path / "bad")), image_size=16)
    save_file(Plain().state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(ModelError, match="does not say which generator"):
        load_generator(GeneratorSpec(checkpoint=str(tmp_path / "bare.safetensors")), image_size=16)
    with pytest.raises(ModelError, match="did you mean 'dcgan'"):
        create_generator("dcgam", {})
    with pytest.raises(ModelError, match="power of two"):
        create_generator("dcgan", {"image_size": 30})
    with pytest.raises(ModelError, match="channels must be 1 or 3"):
        create_generator("dcgan", {"channels": 2})
    with pytest.raises(ModelError, match="cannot make an image"):
        check_generator(create_generator("dcgan", {"image_size": 16, "width": 0}), 16)
    with pytest.raises(ModelError, match=r"pixels must lie in \[0, 1\]"):
        check_generator(Loud(), 16)


def test_a_file_runs_nothing_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger, path = invite(tmp_path / "modules", monkeypatch), tmp_path / "g.safetensors"
    for name in ("stranger:call", "os:system", "builtins:print", f"{__name__}:Plain"):
        save_generator(path, name, {"command": "true"}, Plain())
        with pytest.raises(ModelError, match=r"none of ours .*threat\.generator\.name="):
            load_generator(GeneratorSpec(checkpoint=str(path)), image_size=16)
        with pytest.raises(ModelError, match="not a dcgan"):
            load_generator(GeneratorSpec(checkpoint=str(path), name="dcgan"), image_size=16)
    assert not stranger.ran


def test_a_class_of_ones_own_is_named_by_the_spec_and_the_file_must_agree(tmp_path: Path) -> None:
    path, own = tmp_path / "own.safetensors", f"{__name__}:Plain"
    save_generator(path, own, {"side": 16}, Plain())
    net = load_generator(GeneratorSpec(checkpoint=str(path), name=own), image_size=16)
    assert isinstance(net, Plain)
    with pytest.raises(ModelError, match=r"Plain, not a .*Loud"):
        load_generator(GeneratorSpec(checkpoint=str(path), name=f"{__name__}:Loud"), image_size=16)


def test_one_of_ours_may_be_named_by_its_path(tmp_path: Path) -> None:
    path, options = tmp_path / "g.safetensors", {"image_size": 16, **SMALL}
    name = "fedsim.attacks.generators.dcgan:Dcgan"
    save_generator(path, name, options, create_generator("dcgan", options))
    net = load_generator(GeneratorSpec(checkpoint=str(path)), image_size=16)
    assert type(net).__name__ == "Dcgan"


@pytest.mark.parametrize(
    "options",
    [
        {"width": 10**6},
        {"latent_size": 10**9},
        {"image_size": 2**40},
        {"num_classes": 10**12},
        {"image_size": "16"},
        {"width": None},
        {"nonsense": 1},
        {"mapping": 10**9},
    ],
)
@pytest.mark.parametrize("name", ["dcgan", "stylegan"])
def test_options_in_a_file_ask_for_no_more_room_than_its_tensors(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path, good = tmp_path / "g.safetensors", {"image_size": 16, **SMALL}
    save_generator(path, name, {**good, **options}, create_generator(name, good))
    with pytest.raises(ModelError, match="does not"):
        load_generator(GeneratorSpec(checkpoint=str(path)), image_size=16)


@pytest.mark.parametrize("about", ["[]", "3", '{"name": 3}', '{"options": []}', "[" * 10_000])
def test_what_a_file_says_of_itself_may_be_damaged(tmp_path: Path, about: str) -> None:
    save_tensors(tmp_path / "g", Plain().state_dict(), {"generator": about})
    with pytest.raises(ModelError, match="is no generator file"):
        generator_metadata(tmp_path / "g")
