"""Dropout: where it acts, what its masks give away, and what it leaves to the closed forms."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from fedsim.core.errors import ModelError
from fedsim.core.learning import Protocol, Trail, local_update
from fedsim.core.models import build_model
from fedsim.defenses.dice import head_of
from fedsim.defenses.dp_sgd import DpSgd
from fedsim.defenses.dropout import Dropout, dice_of
from tests.defenses.conftest import (
    CONVNET,
    MODELS,
    VIT,
    Defended,
    assert_canary_holds,
    secret,
)

EVERYWHERE = ["head", "blocks", "embedding"]


def test_what_stays_grows_by_as_much_as_is_left_out() -> None:
    net = Dropout(rate=0.25).prepare_model(build_model(VIT, image_size=32, num_classes=5, seed=0))
    read: list[torch.Tensor] = []
    head = head_of(net, "dropout")
    images = torch.rand(1, 3, 32, 32, generator=secret())
    head.register_forward_hook(lambda _, given, gave: read.append(given[0]))
    net(images)
    dice_of(net).take(secret())
    net(images)
    plain, left = read
    gone = left == 0
    assert 0.05 < float(gone.float().mean()) < 0.5
    assert torch.allclose(left[~gone], plain[~gone] / 0.75)


def test_nobody_but_the_client_leaves_anything_out(vit) -> None:
    net = Dropout(places=EVERYWHERE).prepare_model(copy.deepcopy(vit)).train()
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(net(images), vit.train()(images))
    assert list(net.state_dict()) == list(vit.state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_masks_are_the_clients_secret_and_prove_themselves(model: str) -> None:
    stage, trail = (
        Defended("dropout", {"places": ["head", "blocks"]}, MODELS[model], (70, 20)),
        Trail(),
    )
    one, same, other = stage.uploaded(1, trail), stage.uploaded(1), stage.uploaded(2)
    assert all(torch.equal(t, same.tensors[n]) for n, t in one.tensors.items())
    assert any(not torch.equal(t, other.tensors[n]) for n, t in one.tensors.items())
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("Dropout", "network")]


def test_masks_are_drawn_in_eval_mode_too(vit) -> None:
    defense = Dropout()
    net = defense.prepare_model(vit)
    batch = [(torch.rand(1, 3, 32, 32), torch.tensor([1]))]
    update = local_update(net, batch, Protocol(mode="eval"), defenses=[defense], rng=secret())
    assert bool((update.tensors["head.weight"] == 0).all(0).any())


@pytest.mark.parametrize("model", [VIT, CONVNET], ids=["vit", "convnet"])
@pytest.mark.parametrize("upload", ["gradient", "delta"])
def test_of_one_picture_the_mask_before_the_head_is_read(model, upload: str) -> None:
    stage = Defended("dropout", {}, model, upload=upload)
    informed, net = stage.informed()
    assert "is read" in informed.notes[0]
    mask = dice_of(net).read
    assert mask is not None
    assert 0 < int(mask.sum()) < len(mask)
    knows = stage.matching_loss(adaptive=True)
    assert knows < 1e-5
    assert stage.matching_loss(adaptive=False) > 1e-2


@pytest.mark.parametrize(("places", "rows"), [(["head"], (70, 20)), (["blocks"], (70,))])
def test_other_masks_are_not_read_and_the_note_says_so(places, rows) -> None:
    informed, net = Defended("dropout", {"places": places}, rows=rows).informed()
    assert "matched without" in informed.notes[0]
    assert dice_of(net).read is None


def test_the_canary_holds(tmp_path: Path) -> None:
    assert_canary_holds(tmp_path, "{name: dropout, places: [head, blocks, embedding]}")


def test_closed_forms_do_not_care() -> None:
    assert Defended("dropout", {"places": EVERYWHERE}).solved() > 60


def test_it_works_beside_gradients_of_single_pictures(vit) -> None:
    dropout = Dropout()
    net = dropout.prepare_model(vit)
    batch = [(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))]
    both = [dropout, DpSgd(noise=0.0)]
    updates = [local_update(net, batch, Protocol(), defenses=both, rng=secret()) for _ in range(2)]
    assert torch.equal(updates[0].tensors["head.weight"], updates[1].tensors["head.weight"])


def test_a_network_without_patches_has_no_embedding_to_drop() -> None:
    net = build_model(CONVNET, image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError, match="finds no embedding of patches"):
        Dropout(places=["embedding"]).prepare_model(net)
    bare = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    with pytest.raises(ModelError, match="finds no blocks"):
        Dropout(places=["blocks"]).prepare_model(bare)
