"""Linting: what is called exact is what an audit recovers."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim
from fedsim.audit.stages import audit
from fedsim.core.errors import SpecError
from fedsim.lint import lint
from fedsim.lint.rehearsal import EXACT_DB
from tests.conftest import small_spec
from tests.lint.conftest import defended, predicts_exact, vit
from tests.staging import short_report
from tests.strangers import invite

FAST = {
    "as it is": (True, []),
    "width one short of the patches": (False, [vit(embed_dim=12)]),
    "two images": (False, ["train.batch_size=2"]),
    "clipped": (True, [defended({"name": "clipping", "norm": 0.01})]),
    "noised": (False, [defended("gaussian_noise")]),
    "fixed positions of full rank": (True, [defended("frozen_pe"), vit(embed_dim=192)]),
    "fixed positions of low rank": (False, [defended("sinusoidal_pe"), vit(embed_dim=192)]),
    "summed": (False, [defended("secure_aggregation")]),
}


MORE = {
    "width just enough": (True, [vit(embed_dim=18)]),
    "fine patches": (True, [vit(patch_size=4)]),
    "fine patches in a narrow model": (False, [vit(patch_size=4, embed_dim=48)]),
    "coarse patches": (True, [vit(patch_size=16)]),
    "deeper": (True, [vit(depth=6)]),
    "no class token": (True, [vit(class_token=False, global_pool="avg")]),
    "larger pictures": (True, ["data.image_size=64"]),
    "larger pictures in a narrow model": (False, ["data.image_size=64", vit(embed_dim=48)]),
    "a first block without norm": (True, [vit(plain_first_block=True)]),
    "another model": (
        True,
        [
            "data.image_size=64",
            "model={name: deit_tiny_patch16_224, options: {depth: 2}}",
        ],
    ),
    "eight images": (False, ["train.batch_size=8"]),
    "the delta of one step": (True, ["train.upload=delta"]),
    "a delta with decay and momentum": (
        True,
        [
            "train.upload=delta",
            "train.weight_decay=0.05",
            "train.momentum=0.9",
        ],
    ),
    "a delta of AdamW": (False, ["train.upload=delta", "train.optimizer=adamw", "train.lr=0.001"]),
    "a delta lost in rounding": (False, ["train.upload=delta", "train.lr=1e-6"]),
    "three steps on three images": (False, ["train.upload=delta", "train.local_steps=3"]),
    "three epochs on one image": (
        True,
        [
            "data.clients=512",
            "train.upload=delta",
            "train.local_epochs=3",
            "train.lr=0.01",
        ],
    ),
    "clipped by the protocol": (True, ["train.clip=0.1"]),
    "the head without some features": (True, [defended("soteria")]),
    "repeated labels": (True, [defended("label_disguise")]),
    "noise below rounding": (True, [defended({"name": "gaussian_noise", "std": 1e-9})]),
    "Laplace noise": (False, [defended({"name": "laplace_noise", "std": 0.01, "relative": True})]),
    "a tenth of the numbers": (False, [defended("top_k")]),
    "all of the numbers": (True, [defended({"name": "top_k", "sparsity": 0})]),
    "half of the numbers": (False, [defended({"name": "random_k", "sparsity": 0.5})]),
    "eight bits": (False, [defended("quantization")]),
    "one bit": (False, [defended({"name": "quantization", "kind": "sign"})]),
    "DP-SGD": (False, [defended("dp_sgd")]),
    "DP-SGD without noise": (True, [defended({"name": "dp_sgd", "noise": 0})]),
    "DP-SGD thrown away": (True, [defended("dp_sgd", "soteria")]),
    "local DP": (False, [defended("local_dp")]),
    "local DP that promises nothing": (True, [defended({"name": "local_dp", "epsilon": 1e9})]),
    "a sum of one client": (True, [defended("secure_aggregation"), "train.clients_per_round=1"]),
    "a jigsaw half of the time": (True, [defended({"name": "mjp", "ratio": 0.5})]),
    "a jigsaw always": (False, [defended({"name": "mjp", "ratio": 0.5, "probability": 1})]),
    "a jigsaw from the second round on": (
        True,
        [defended({"name": "mjp", "ratio": 0.5, "probability": 1, "warmup": 1})],
    ),
    "fixed positions": (True, [defended("frozen_pe")]),
    "fixed positions in a narrow model": (False, [defended("frozen_pe"), vit(embed_dim=24)]),
    "fixed positions of fine patches": (False, [defended("frozen_pe"), vit(patch_size=4)]),
    "fixed positions and clipping": (True, [defended("frozen_pe", "clipping")]),
    "no position gradient": (True, [defended("withheld"), vit(embed_dim=192)]),
    "no patch gradient": (False, [defended({"name": "withheld", "parts": ["patches"]})]),
    "no head": (True, [defended({"name": "withheld", "parts": ["head"]})]),
    "neither positions nor patches": (
        False,
        [defended({"name": "withheld", "parts": ["position", "patches"]})],
    ),
}


BROAD = vit(embed_dim=384, num_heads=6)
PARTS = {
    "the head alone": (False, ["train.trainable=head"]),
    "norms": (False, ["train.trainable=norm"]),
    "biases and the head": (False, ["train.trainable=[bias, head]"]),
    "positions and patches": (True, ["train.trainable=[patch_embed, pos_embed]"]),
    "patches alone": (False, ["train.trainable=patch_embed"]),
    "the first block, broad": (True, ["train.trainable=blocks.0", BROAD]),
    "the first block, narrow": (False, ["train.trainable=blocks.0", vit(embed_dim=192)]),
    "the last block": (False, ["train.trainable=blocks.1", BROAD]),
    "adapters": (False, ["train.trainable=[lora, head]"]),
    "adapters of a small rank": (False, ["train.trainable=lora", BROAD]),
    "adapters beside positions and patches": (
        True,
        ["train.trainable=[lora, head, patch_embed, pos_embed]"],
    ),
    "adapters beside patches, at zero": (
        True,
        [
            "train.trainable=[lora, patch_embed]",
            "train.lora.r=64",
            "train.rounds=1",
            vit(embed_dim=192),
        ],
    ),
    "adapters on MLPs": (
        False,
        ["train.trainable=lora", "train.lora={r: 32, targets: [mlp]}", BROAD],
    ),
    "an adapter on the patches": (
        True,
        ["train.trainable=[lora, pos_embed]", "train.lora={r: 32, targets: [patch_embed.proj]}"],
    ),
    "an adapter on the patches, at zero": (
        False,
        [
            "train.trainable=[lora, pos_embed]",
            "train.lora={r: 32, targets: [patch_embed.proj]}",
            "train.rounds=1",
        ],
    ),
    "adapters and two pictures": (
        False,
        ["train.trainable=[lora, patch_embed, pos_embed]", "train.batch_size=2"],
    ),
}


CASES = [pytest.param(*case, id=name) for name, case in FAST.items()] + [
    pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in (MORE | PARTS).items()
]


@pytest.mark.parametrize(("exact", "overrides"), CASES)
def test_what_is_called_exact_is_what_an_audit_recovers(
    exact: bool, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.report.write_report", short_report)
    spec = small_spec("attacks=[{name: patch_solve}, {name: row_space}]", *overrides)
    predicted = predicts_exact(lint(spec))
    scores = audit(spec, tmp_path / "run", willing=True).scores
    own = scores[scores["attack"].isin(["patch_solve", "row_space"])]
    recovered = not own.empty and float(own["psnr"].max()) > EXACT_DB
    assert (predicted, recovered) == (exact, exact)


def test_code_that_a_spec_names_is_not_run_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = invite(tmp_path, monkeypatch)
    spec = small_spec(defended("stranger:Defended"))
    with pytest.raises(SpecError, match=r"import path \(stranger:Defended\).*add --trust"):
        lint(spec)
    with pytest.raises(SpecError, match="import path"):
        fedsim.lint(spec)
    assert not stranger.ran
    assert fedsim.lint(spec, trust=True).of("unknown-defense")
    assert stranger.ran


@pytest.mark.parametrize(
    ("odd", "rule"),
    [
        ("Everywhere", "exact-inversion-fixed-positions"),  # whose own gradient is of many places
        ("RegistersFixed", "exact-inversion-fixed-positions"),
        ("Grid", "exact-inversion"),
    ],
)
def test_odd_models_are_called_exact_by_the_form_that_has_them(odd: str, rule: str) -> None:
    found = lint(small_spec(f"model={{name: 'tests.oddities:{odd}'}}"), trust=True)
    certain = [f.rule for f in found.findings if f.severity == "certain"]
    assert rule in certain
    assert min(found.facts.rehearsal.psnr) > EXACT_DB
