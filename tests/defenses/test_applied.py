"""Defenses applied: the same ones for a client, for a server, and for an attacker."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.errors import SpecError
from fedsim.core.learning import Protocol, Update
from fedsim.core.models import build_architecture
from fedsim.core.observation import Public
from fedsim.core.spec import Upload
from fedsim.defenses.applied import (
    announced,
    client_of,
    countered,
    declared,
    hiding,
    prepared,
    refuse_other_training,
)
from tests.conftest import small_spec

FROZEN = "defenses=[{name: clipping, norm: 2.0}, {name: frozen_pe}]"


def test_a_spec_and_what_it_makes_public_declare_the_same() -> None:
    spec = small_spec(FROZEN)
    public = Public.of(spec, 8)
    assert declared(spec.defenses) == declared(public.defenses)
    assert [type(defense).__name__ for defense in declared(spec.defenses)] == [
        "Clipping",
        "FrozenPE",
    ]


def test_the_announced_model_is_the_one_that_clients_prepare() -> None:
    spec = small_spec(FROZEN)
    plain = build_architecture(spec.model, image_size=spec.data.image_size, num_classes=8)
    model = prepared(plain, declared(spec.defenses))
    told = announced(Public.of(spec, 8))
    assert told.state_dict().keys() == model.state_dict().keys()
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (model, told)]
    assert trained[0] == trained[1]
    assert "pos_embed" not in trained[0]


def test_an_informed_server_knows_that_zeros_were_not_uploaded() -> None:
    spec = small_spec("defenses=[{name: top_k, sparsity: 0.5}]")
    update = Update(Upload.GRADIENT, {"head.weight": torch.tensor([0.0, 1.0])})
    assert countered(update, spec.defenses, torch.nn.Identity()).masked


def test_one_defense_hides_single_uploads() -> None:
    assert hiding(declared(small_spec(FROZEN).defenses)) is None
    names = [{"name": "clipping"}, {"name": "secure_aggregation"}]
    assert type(hiding(declared(names))).__name__ == "SecureAggregation"


@pytest.mark.parametrize(
    ("train", "defense", "words"),
    [
        ("loss: {label_smoothing: 0.1}", "dp_sgd", r"DpSgd computes.*train\.loss would do nothing"),
        ("precision: bfloat16", "soteria", r"Soteria computes.*train\.precision"),
        ("accumulate: 2", "dp_sgd", r"train\.accumulate"),
        ("augment: [{name: MixUp}]", "dp_sgd", r"train\.augment with mixtures"),
        ("upload_dtype: float16", "secure_aggregation", r"whole numbers, so train\.upload_dtype"),
    ],
)
def test_training_that_a_defense_would_not_do_is_refused(
    train: str, defense: str, words: str
) -> None:
    spec = small_spec(f"train={{{train}}}", f"defenses=[{{name: {defense}}}]")
    with pytest.raises(SpecError, match=words):
        refuse_other_training(spec.train, declared(spec.defenses))
    refuse_other_training(spec.train, declared([{"name": "gaussian_noise"}]))


def test_what_was_uploaded_in_half_is_countered_in_float32() -> None:
    update = Update(Upload.GRADIENT, {"head.weight": torch.ones(2, dtype=torch.bfloat16)})
    model = build_architecture(small_spec().model, image_size=32, num_classes=8)
    assert countered(update, [], model).update.tensors["head.weight"].dtype == torch.float32


def test_a_simulated_client_defends_itself_as_in_its_round_without_masks() -> None:
    defenses = [
        {"name": "clipping", "norms": [2.0, 0.5]},
        {"name": "secure_aggregation"},
    ]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    batch = (torch.rand(2, 3, 2, 2), torch.tensor([0, 1]))  # one of them is badly wrong
    for round_, norm in ((1, 2.0), (2, 0.5)):
        client = client_of(defenses, round_, 0, (0, 1))
        big = Protocol(mean=(-50.0,) * 3)
        update = client(net, [batch], big, rng=torch.Generator(), seed=0)
        whole = torch.cat([t.flatten() for t in update.tensors.values()])
        assert whole.is_floating_point()
        assert float(whole.norm()) == pytest.approx(norm, abs=1e-4)
