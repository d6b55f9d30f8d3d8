"""CENSOR: orthogonal gradients, and when the true one is uploaded all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fedsim.core.learning import Protocol, Trail, local_update
from fedsim.defenses.censor import Censor, orthogonal
from tests.defenses.conftest import MODELS, Defended, assert_canary_holds, secret


def test_a_direction_is_orthogonal_and_as_long_as_the_gradient() -> None:
    gradient = torch.tensor([[3.0, -1.0], [2.0, 5.0]])
    other = orthogonal(gradient, secret())
    assert float((gradient * other).sum()) == pytest.approx(0, abs=1e-5)
    assert float(other.norm()) == pytest.approx(float(gradient.norm()))
    assert not torch.equal(other, orthogonal(gradient, secret(1)))


def test_to_one_number_and_to_zeros_nothing_is_orthogonal() -> None:
    assert not orthogonal(torch.tensor([2.0]), secret()).any()
    assert not orthogonal(torch.zeros(3), secret()).any()


@pytest.mark.parametrize("model", MODELS)
def test_of_the_gradient_only_the_layers_norms_are_left(model: str) -> None:
    stage, trail = Defended("censor", {"otherwise": "best"}, MODELS[model], rows=(70, 20)), Trail()
    update = stage.uploaded(trail=trail)
    plain = local_update(stage.net, [stage.batch], stage.public.protocol)
    for name, true in plain.tensors.items():
        if true.numel() > 1 and float(true.norm()) > 1e-4:
            cosine = F.cosine_similarity(update.tensors[name].flatten(), true.flatten(), dim=0)
            assert abs(float(cosine)) < 1e-3, name
            assert float(update.tensors[name].norm()) == pytest.approx(float(true.norm()), rel=1e-3)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("Censor", "gradient")]
    same = [torch.equal(b, plain.buffers[n]) for n, b in update.buffers.items()]
    assert all(same)  # trials do not move BatchNorm's statistics


def test_where_no_trial_is_better_the_true_gradient_is_uploaded(vit) -> None:
    """A step so long that every direction makes the loss larger."""
    batch = [(torch.rand(1, 3, 32, 32, generator=secret()), torch.tensor([1]))]
    plain = local_update(vit, batch, Protocol())
    far = Censor(trials=3, rate=1e9)
    update = local_update(vit, batch, Protocol(), defenses=[far], rng=secret())
    assert all(torch.equal(t, plain.tensors[n]) for n, t in update.tensors.items())
    kept = Censor(trials=3, rate=1e9, otherwise="best")
    update = local_update(vit, batch, Protocol(), defenses=[kept], rng=secret())
    assert not torch.equal(update.tensors["head.weight"], plain.tensors["head.weight"])
    assert far.spares
    assert not kept.spares


def test_the_model_is_left_where_it_was(vit) -> None:
    before = {n: t.clone() for n, t in vit.state_dict().items()}
    vit.train()
    Censor(trials=2).batch_gradient(vit, torch.rand(1, 3, 32, 32), torch.tensor([0]), secret())
    assert all(torch.equal(t, before[n]) for n, t in vit.state_dict().items())
    assert vit.training


def test_after_its_rounds_nothing_is_defended() -> None:
    assert isinstance(Censor(rounds=2).at_round(2, 0, [0]), Censor)
    assert not isinstance(Censor(rounds=2).at_round(3, 0, [0]), Censor)


def test_a_server_is_told_what_it_has() -> None:
    informed, _ = Defended("censor", {}).informed()
    assert "only the layers' norms" in informed.notes[0]
    assert not informed.masked


def test_the_canary_holds(tmp_path: Path) -> None:
    assert_canary_holds(tmp_path, "{name: censor, trials: 3, otherwise: best}")
