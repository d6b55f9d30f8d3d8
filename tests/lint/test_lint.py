"""Linting: each rule both ways, and that what it calls exact is what an audit recovers."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.audit.stages import audit
from fedsim.cli import main
from fedsim.core.defense import Defense
from fedsim.core.errors import SpecError
from fedsim.core.learning import Update
from fedsim.core.spec import Spec
from fedsim.lint import Lint, lint
from fedsim.lint.findings import Finding, exit_code
from fedsim.lint.rehearsal import EXACT_DB, made_up
from fedsim.lint.rules import NAMES, RULES
from tests.conftest import SMALL, small_spec

EXACT_RULES = ("exact-inversion", "exact-inversion-fixed-positions")


def vit(patch_size: int = 8, embed_dim: int = 96, depth: int = 2, **more: object) -> str:
    options = {"patch_size": patch_size, "depth": depth, "embed_dim": embed_dim, **more}
    return f"model.options={json.dumps(options)}"


def defended(*defenses: str | dict) -> str:
    named = [{"name": d} if isinstance(d, str) else d for d in defenses]
    return f"defenses={json.dumps(named)}"


def linted(*overrides: str) -> Lint:
    return lint(small_spec(*overrides))


def severities(result: Lint, rule: str) -> list[str]:
    return [finding.severity for finding in result.of(rule)]


def predicts_exact(result: Lint) -> bool:
    return any("certain" in severities(result, rule) for rule in EXACT_RULES)


# -- agreement: predicted from the spec, measured by the audit -----------------------------------

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
    "a jigsaw half of the time": (True, [defended("mjp")]),
    "a jigsaw always": (False, [defended({"name": "mjp", "probability": 1})]),
    "a jigsaw from the second round on": (
        True,
        [defended({"name": "mjp", "probability": 1, "warmup": 1})],
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
CASES = [pytest.param(*case, id=name) for name, case in FAST.items()] + [
    pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()
]


@pytest.mark.parametrize(("exact", "overrides"), CASES)
def test_what_is_called_exact_is_what_an_audit_recovers(
    exact: bool, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.report.write_report", lambda run, jobs, redacted: None)
    spec = small_spec("attacks=[{name: patch_solve}, {name: row_space}]", *overrides)
    began = time.process_time()  # others may use this machine as well
    predicted = predicts_exact(lint(spec))
    assert time.process_time() - began < 5
    scores = audit(spec, tmp_path / "run").scores
    own = scores[scores["attack"].isin(["patch_solve", "row_space"])]
    recovered = not own.empty and float(own["psnr"].max()) > EXACT_DB
    assert (predicted, recovered) == (exact, exact)


# -- pictures ------------------------------------------------------------------------------------


def test_the_reason_holds_the_numbers_that_decide() -> None:
    (finding,) = linted(vit(patch_size=4)).of("exact-inversion")
    assert finding.severity == "certain"
    assert "rank 64 for 64 patches (width 96)" in finding.reason
    assert finding.remedy == ("train.batch_size=8",)


def test_a_rank_that_falls_a_little_short_is_likely_not_certain() -> None:
    result = linted(vit(patch_size=4, embed_dim=63))
    assert severities(result, "exact-inversion") in (["likely"], [])
    assert not predicts_exact(result)
    assert linted(vit(patch_size=4, embed_dim=66)).exit_code == 5


def test_an_attacker_who_lacks_what_is_needed_is_told_of() -> None:
    (finding,) = linted("threat=A", "attacks=[]").of("exact-inversion")
    assert "threat A" in finding.reason
    assert "batch_size" in finding.reason
    assert finding.threat == "B"
    (informed,) = linted("threat=B").of("exact-inversion")
    assert "lacks" not in informed.reason


def test_fixed_positions_are_said_to_hold_or_not_by_their_rank() -> None:
    broken = linted(defended("frozen_pe"), vit(embed_dim=192))
    assert severities(broken, "exact-inversion-fixed-positions") == ["certain"]
    assert not broken.of("fixed-positions-hold")
    held = linted(defended("sinusoidal_pe"), vit(embed_dim=192))
    assert not held.of("exact-inversion-fixed-positions")
    (note,) = held.of("fixed-positions-hold")
    assert "for 16 patches" in note.reason
    (narrow,) = linted(defended("frozen_pe"), vit(embed_dim=24)).of("fixed-positions-hold")
    assert "7 equations for 17 unknowns" in narrow.reason


def test_a_defense_is_called_bypassed_only_where_the_picture_comes_back() -> None:
    (clipped,) = linted(defended("clipping")).of("bypassed-defense")
    assert "clipping" in clipped.reason
    assert not linted(defended("gaussian_noise")).of("bypassed-defense")
    assert not linted(defended("clipping"), "train.batch_size=4").of("bypassed-defense")


def test_what_alone_ends_exactness_is_named() -> None:
    (note,) = linted(defended("clipping", "gaussian_noise")).of("exactness-ended")
    assert "gaussian_noise" in note.reason
    assert not linted(defended("clipping")).of("exactness-ended")


def test_a_jigsaw_says_that_its_mask_is_public() -> None:
    result = linted(defended("mjp"))
    (mask,) = result.of("readable-mask")
    assert "8 of 16 patches" in mask.reason
    assert "probability 0.5" in result.of("bypassed-defense")[0].reason
    assert not linted(defended({"name": "mjp", "unknown": False})).of("readable-mask")


def test_a_jigsaw_that_seldom_rests_is_exact_when_it_does() -> None:
    assert predicts_exact(linted(defended({"name": "mjp", "probability": 0.999})))
    assert not predicts_exact(linted(defended({"name": "mjp", "probability": 1})))
    both = linted(defended({"name": "mjp", "probability": 0.999}, "gaussian_noise"))
    assert not predicts_exact(both)


def test_a_plain_chain_is_likely_to_be_inverted_layer_by_layer() -> None:
    chain = ["data.image_size=16", "model={name: convnet}"]
    assert severities(linted(*chain), "layer-by-layer") == ["likely"]
    assert not linted(*chain, "train.batch_size=2").of("layer-by-layer")
    assert not linted().of("layer-by-layer")


# -- labels and statistics -----------------------------------------------------------------------


def test_one_label_is_certain_several_are_likely_and_none_without_a_head() -> None:
    assert severities(linted(), "labels") == ["certain"]
    assert severities(linted("train.batch_size=4"), "labels") == ["likely"]
    assert not linted(defended({"name": "withheld", "parts": ["head"]})).of("labels")
    assert not linted(defended("secure_aggregation")).of("labels")


def test_batch_statistics_are_found_where_batchnorm_is_shared() -> None:
    net = ["model={name: test_resnet}", "train.batch_size=4"]
    assert severities(linted(*net), "batch-statistics") == ["certain"]
    several = linted(*net, "train.upload=delta", "train.local_steps=2")
    assert severities(several, "batch-statistics") == ["likely"]
    assert not linted(*net, "train.batchnorm=local").of("batch-statistics")
    assert not linted(*net, "train.mode=eval").of("batch-statistics")
    assert not linted().of("batch-statistics")


# -- defenses ------------------------------------------------------------------------------------


def test_a_sum_of_one_client_is_no_protection() -> None:
    alone = linted(defended("secure_aggregation"), "train.clients_per_round=1")
    assert severities(alone, "lonely-aggregation") == ["certain"]
    together = linted(defended("secure_aggregation"))
    assert not together.of("lonely-aggregation")
    assert "sums of 2 clients" in together.of("aggregate-is-visible")[0].reason
    assert together.exit_code == 0


def test_a_defense_after_the_masks_is_in_the_wrong_place() -> None:
    wrong = linted(defended("secure_aggregation", "gaussian_noise"))
    (finding,) = wrong.of("order-of-defenses")
    assert "gaussian_noise" in finding.reason
    assert not linted(defended("gaussian_noise", "secure_aggregation")).of("order-of-defenses")


def test_a_gradient_that_is_replaced_protects_nothing() -> None:
    assert severities(linted(defended("dp_sgd", "soteria")), "replaced-gradient") == ["certain"]
    assert not linted(defended("dp_sgd")).of("replaced-gradient")


def test_budgets_are_judged_by_their_size() -> None:
    none = linted(defended({"name": "dp_sgd", "noise": 0}))
    assert severities(none, "no-privacy-budget") == ["certain"]
    weak = linted(defended({"name": "local_dp", "epsilon": 1000}))
    assert severities(weak, "weak-privacy-budget") == ["likely"]
    good = linted(defended({"name": "dp_sgd", "noise": 2}))
    assert not good.of("no-privacy-budget")
    assert not good.of("weak-privacy-budget")
    assert good.of("uploaded-in-clear")
    assert not linted(defended("clipping")).of("uploaded-in-clear")


@dataclass(frozen=True)
class Doubling(Defense):
    """A defense of somebody's own that defends nothing."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: 2 * t for n, t in update.tensors.items()})


@dataclass(frozen=True)
class Silence(Defense):
    """A defense of somebody's own that ends everything."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: 0 * t for n, t in update.tensors.items()})


@dataclass(frozen=True)
class Broken(Defense):
    """A defense of somebody's own that fails."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        raise ValueError("a mistake of its own.")


def test_a_defense_of_somebodys_own_is_judged_by_what_it_does() -> None:
    useless = linted(defended("tests.lint.test_lint:Doubling"))
    assert predicts_exact(useless)
    (note,) = useless.of("unknown-defense")
    assert "overrides protect_update" in note.reason
    silent = linted(defended("tests.lint.test_lint:Silence"))
    assert not predicts_exact(silent)
    assert silent.exit_code == 0


def test_a_defense_that_fails_is_told_of_and_nothing_is_called_certain() -> None:
    result = linted(defended("tests.lint.test_lint:Broken"))
    (note,) = result.of("not-rehearsed")
    assert "a mistake of its own" in note.reason
    assert "unjudged" in result.of("unknown-defense")[0].reason
    assert result.exit_code == 0


# -- the audit itself ----------------------------------------------------------------------------


def test_what_an_audit_would_miss_is_noted() -> None:
    assert not linted().of("missing-attack")
    (missing,) = linted("attacks=[{name: dlg}]").of("missing-attack")
    assert "patch_solve" in missing.reason
    assert linted("train.rounds=1").of("first-round-only")
    assert not linted().of("first-round-only")
    assert linted("threat={model: C, oracle_labels: true}").of("oracle-labels")
    assert not linted().of("oracle-labels")


def test_a_spec_is_linted_without_its_data() -> None:
    result = linted("data={name: cifar10, path: nowhere, clients: 4}")
    assert "10 classes" in result.of("absent-data")[0].reason
    assert predicts_exact(result)
    assert not linted().of("absent-data")


def test_a_model_too_large_to_be_filled_is_judged_by_its_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedsim.lint.facts.LARGEST", 1000)
    result = linted()
    assert severities(result, "exact-inversion") == ["likely"]
    assert result.of("not-rehearsed")
    assert not linted(vit(embed_dim=12)).of("exact-inversion")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [defended("clipping")],
        [defended("frozen_pe"), vit(embed_dim=192)],
        [defended("mjp")],
        ["model={name: test_resnet}", "train.batch_size=4"],
        [defended("secure_aggregation"), "train.clients_per_round=1"],
        [defended("secure_aggregation", "gaussian_noise")],
        [defended("dp_sgd", "soteria")],
        [defended({"name": "local_dp", "epsilon": 1000})],
        ["attacks=[{name: dlg}]", "train.rounds=1"],
        ["threat={model: C, oracle_labels: true}"],
        ["data.clients=512", "train.upload=delta", "train.local_epochs=3"],
    ],
)
def test_every_remedy_removes_its_finding(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.lint.rehearsal.DRAWS", 1)
    monkeypatch.setattr("fedsim.lint.rehearsal.CHANCES", 2)
    for finding in linted(*overrides).findings:
        if finding.remedy:
            cured = linted(*overrides, *finding.remedy)
            assert finding.severity not in severities(cured, finding.rule), finding


# -- the command ---------------------------------------------------------------------------------


def test_the_worst_finding_is_the_exit_code() -> None:
    certain, likely, note = (Finding("labels", s, "") for s in ("certain", "likely", "note"))
    assert exit_code([]) == exit_code([note]) == 0
    assert exit_code([note, likely]) == 4
    assert exit_code([likely, certain, note]) == 5


def test_the_command_tells_and_ends_with_the_code(capsys, monkeypatch) -> None:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", "lint", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr().out

    code, told = run(*SMALL)
    assert code == 5
    assert "exact-inversion" in told
    assert "train.batch_size=8" in told
    code, told = run(*SMALL, "--json", "train.batch_size=4")
    found = json.loads(told)
    assert code == found["exit_code"] == 4
    assert [f["rule"] for f in found["findings"] if f["severity"] == "likely"] == ["labels"]
    code, told = run(*SMALL, "train.batch_size=4", "--ignore", "labels")
    assert code == 0
    assert run(*SMALL, "--ignore", "label")[0] == 2
    assert run(*SMALL, "train.batch_sice=4")[0] == 2


def test_the_function_takes_what_the_command_takes() -> None:
    result = fedsim.lint({}, *SMALL, ignore=["labels"], threat="B")
    assert isinstance(result.facts.spec, Spec)
    assert not result.of("labels")
    with pytest.raises(SpecError, match="did you mean 'labels'"):
        fedsim.lint({}, *SMALL, ignore=["lables"])


def test_every_rule_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []
    assert len(RULES) <= len(NAMES)


def test_made_up_pictures_are_stored_as_pictures_are() -> None:
    pictures = made_up(2, 16, torch.Generator().manual_seed(0))
    assert pictures.shape == (2, 3, 16, 16)
    assert 0 <= float(pictures.min()) < float(pictures.max()) <= 1
    assert torch.allclose(pictures * 255, (pictures * 255).round(), atol=1e-4)
    assert not torch.equal(pictures[0], pictures[1])
