"""The defenses by name: found, checked, on record, and mild enough to learn under."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedsim.audit.stages import audit
from fedsim.core.errors import ModelError, SpecError
from fedsim.core.learning import Protocol, Trail, digest, learn, local_update
from fedsim.core.spec import Component, TrainSpec, load_spec
from fedsim.defenses import DEFENSES, create_defense, create_defenses
from fedsim.defenses.applied import countered, hiding, prepared
from tests.conftest import small_spec
from tests.defenses.conftest import BATCH, secret, upload


def test_a_defense_proves_that_it_changed_the_payload(vit) -> None:
    trail = Trail()
    noise = create_defense("gaussian_noise", std=0.1)
    update = learn(vit, BATCH, Protocol(), defenses=[noise], rng=secret(), trail=trail)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("GaussianNoise", "update")]
    assert trail.entries[0]["after"] == digest(update.tensors) != trail.entries[0]["before"]


def test_a_defense_that_does_nothing_leaves_no_proof(vit) -> None:
    trail = Trail()
    learn(vit, BATCH, Protocol(), defenses=[create_defense("gaussian_noise", std=0.0)], trail=trail)
    assert trail.entries == []


def test_bad_defenses_are_one_sentence() -> None:
    with pytest.raises(SpecError, match="did you mean 'gaussian_noise'"):
        create_defense("gausian_noise")
    with pytest.raises(SpecError, match="std"):
        create_defense("gaussian_noise", std=-1)
    twice = [Component(name="frozen_pe"), Component(name="frozen_pe")]
    with pytest.raises(SpecError, match="twice"):
        create_defenses(twice)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("top_k", {"sparsity": 1.0}),
        ("random_k", {"sparsity": -0.1}),
        ("laplace_noise", {"std": -1}),
        ("clipping", {"norm": 0}),
        ("dp_sgd", {"noise": -1}),
        ("mjp", {"ratio": 0}),
        ("quantization", {"kind": "int3"}),
        ("withheld", {"parts": ["everything"]}),
        ("oasis", {"transforms": []}),
        ("oasis", {"transforms": ["zoom"]}),
        ("censor", {"trials": 0}),
        ("percentile_privacy", {"percentile": 101}),
        ("svt_privacy", {"fraction": 0}),
        ("dropout", {"rate": 1.0}),
        ("dropout", {"places": ["tail"]}),
        ("precode", {"size": 0}),
    ],
)
def test_a_strength_out_of_range_is_one_sentence(name: str, params: dict) -> None:
    with pytest.raises(SpecError, match=next(iter(params))):
        create_defense(name, **params)


def test_what_an_upload_takes_on_a_wire(vit) -> None:
    plain = local_update(vit, BATCH, Protocol())
    numbers = sum(t.numel() for t in plain.tensors.values())
    assert plain.nbytes() == 4 * numbers

    def size(name: str, **params) -> float:
        defense = create_defense(name, **params)
        return defense.encoded_bytes(upload(vit, defense)) / numbers

    assert size("top_k", sparsity=0.9) == pytest.approx(0.8, rel=0.02)  # a number and its place
    assert size("top_k", sparsity=0.1) == pytest.approx(4.0, rel=0.02)  # dense is shorter
    assert size("quantization") == pytest.approx(1.0, rel=0.01)
    assert size("quantization", kind="sign") == pytest.approx(1 / 8, rel=0.02)
    assert create_defense("clipping").encoded_bytes(plain) is None


MILD = {
    "mjp": {"ratio": 0.3},
    "gaussian_noise": {"std": 0.001, "relative": True},
    "laplace_noise": {"std": 0.001, "relative": True},
    "top_k": {"sparsity": 0.5},
    "random_k": {"sparsity": 0.5},
    "quantization": {"kind": "int8"},
    "clipping": {"norm": 1.0},
    "dp_sgd": {"noise": 0.01},
    "local_dp": {"epsilon": 5000},
    "frozen_pe": {},
    "sinusoidal_pe": {},
    "withheld": {"parts": ["position"]},
    "label_disguise": {},
    "soteria": {"ratio": 0.2},
    "secure_aggregation": {},
    "oasis": {"transforms": ["horizontal_flip"]},
    "censor": {},
    "percentile_privacy": {},
    "svt_privacy": {"fraction": 0.9, "epsilon": 10, "noise_var": 100, "gamma": 0.01},
    "dropout": {"rate": 0.1},
    "precode": {},
}


def test_every_defense_has_a_mild_strength() -> None:
    assert MILD.keys() == DEFENSES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", MILD)
def test_a_defense_lets_the_federation_learn_at_its_mild_strength(name: str, tmp_path) -> None:
    """The default data and a small ViT: eight classes, 128 test pictures, chance is one in eight;
    a model that guesses is above 22 % once in a thousand times."""
    from fedsim.audit.stages import federate

    own = yaml.safe_dump([{"name": name, **MILD[name]}], default_flow_style=True)
    spec = load_spec(
        {},
        [
            "data={name: photos, image_size: 32, clients: 8}",
            "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
            "train={rounds: 6, batch_size: 8, upload: delta, local_epochs: 1, lr: 0.03, "
            "momentum: 0.9}",
            f"defenses={own}",
            "engine={kind: inline, device: cpu}",
        ],
    )
    run = federate(spec, tmp_path / "run")
    assert float(run.rounds["test_accuracy"].iloc[-1]) > 0.22


PARTS = {"head": "head", "norms": "norm", "adapters": "lora", "both": ("lora", "head")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", DEFENSES)
def test_every_defense_takes_an_update_of_a_part_or_says_that_it_cannot(
    vit, name: str, part: str
) -> None:
    train = TrainSpec(trainable=PARTS[part])
    defense = create_defense(name).at_round(1, 0, [0, 1])
    if name == "soteria" and "head" not in PARTS[part]:
        with pytest.raises(ModelError, match=r"gradient of the head \('head\.weight'\)"):
            prepared(vit, [defense], train)
        return
    model = prepared(vit, [defense], train)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    protocol = Protocol(trainable=train.trainable)
    one, other = (
        local_update(model, BATCH, protocol, defenses=[defense], rng=secret()) for _ in range(2)
    )
    assert list(one.tensors) == trained
    assert digest(one.tensors) == digest(other.tensors)
    if hiding([defense]) is None:
        left = set(countered(one, [{"name": name}], model).update.tensors)
        told = {"head.weight"} if (name, part) == ("precode", "both") else set()
        assert left == one.tensors.keys() - told


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in DEFENSES if n != "label_disguise"])
def test_a_federation_of_adapters_runs_under_every_defense(name: str, tmp_path: Path) -> None:
    spec = small_spec(
        "train.trainable=[lora, head]", f"defenses=[{{name: {name}}}]", "attacks=[{name: features}]"
    )
    run = audit(spec, tmp_path / "run")
    assert len(run.scores) == 2 * 4
    assert (run.scores["canary"] < 1e-4).all()
