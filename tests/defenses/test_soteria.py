"""Soteria: the features that tell most are left out."""

from __future__ import annotations

import torch

from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH, upload


def test_soteria_leaves_out_the_features_that_tell_most(vit) -> None:
    defense = create_defense("soteria", ratio=0.25, probes=400)
    plain, held = local_update(vit, BATCH, Protocol()).tensors, upload(vit, defense).tensors
    gone = (held["head.weight"] == 0).all(0)
    assert int(gone.sum()) == 24
    assert torch.allclose(held["head.weight"][:, ~gone], plain["head.weight"][:, ~gone])
    same = "blocks.0.attn.qkv.weight"
    assert torch.allclose(held[same], plain[same], atol=1e-6)
    x = Protocol().normalise(BATCH[0][0])

    def features(images):
        return vit.forward_head(vit.forward_features(images), pre_logits=True)

    jacobian = torch.autograd.functional.jacobian(features, x)[0].flatten(1)
    told = jacobian.norm(dim=1) / features(x)[0].abs()
    exact = set(told.topk(24).indices.tolist())
    assert len(exact & set(torch.nonzero(gone)[:, 0].tolist())) >= 21


def test_soteria_finds_a_head_whose_weights_go_by_another_name() -> None:
    spec = ModelSpec(name="tests.oddities:TiedElsewhere")
    net = build_model(spec, image_size=32, num_classes=5, seed=0)
    held = upload(net, create_defense("soteria", ratio=0.25)).tensors
    assert int((held["alias"] == 0).all(0).sum()) == 16
