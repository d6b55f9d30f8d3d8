"""The rules of linting, each both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.lint import rules
from fedsim.lint.rules import NAMES, RULES
from fedsim.scoring.recovery import RECOVERED_DB
from tests.lint.conftest import defended, linted, predicts_exact, severities, vit


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


@pytest.mark.parametrize("name", ["dropout", "precode"])
def test_what_is_drawn_inside_the_network_does_not_hide_a_picture(name: str) -> None:
    result = linted(defended(name))
    assert severities(result, "exact-inversion") == ["certain"]
    (bypassed,) = result.of("bypassed-defense")
    assert f"{name} draws inside the network" in bypassed.reason
    assert not result.of("random-training")  # its replay follows
    active = linted(defended(name), "threat=F", "server.manoeuvre.name=fishing")
    wanted = {"dropout": "certain", "precode": "likely"}[name]
    assert severities(active, "active-server") == [wanted]


@pytest.mark.parametrize("name", ["oasis", "percentile_privacy", "svt_privacy"])
def test_defenses_that_end_exactness_are_not_called_bypassed(name: str) -> None:
    result = linted(defended(name))
    assert not predicts_exact(result)
    assert not result.of("bypassed-defense")
    (note,) = result.of("exactness-ended")
    assert f"{name} is all that hides it" in note.reason


def test_a_defense_that_spares_some_steps_is_bypassed_in_those() -> None:
    (bypassed,) = linted(defended("censor")).of("bypassed-defense")
    assert "censor leaves some batches as they are" in bypassed.reason
    always = linted(defended({"name": "censor", "otherwise": "best"}))
    assert not always.of("bypassed-defense")
    assert not predicts_exact(always)


@pytest.mark.parametrize("name", ["censor", "dropout", "precode"])
def test_a_chain_of_layers_is_not_claimed_under_them(name: str) -> None:
    plain = ("model={name: convnet}", "model.options={}")
    assert linted(*plain).of("layer-by-layer")
    assert not linted(*plain, defended(name)).of("layer-by-layer")


def test_what_alone_ends_exactness_is_named() -> None:
    (note,) = linted(defended("clipping", "gaussian_noise")).of("exactness-ended")
    assert "gaussian_noise" in note.reason
    assert not linted(defended("clipping")).of("exactness-ended")


def test_a_jigsaw_says_that_its_mask_is_public() -> None:
    result = linted(defended({"name": "mjp", "ratio": 0.5}))
    (mask,) = result.of("readable-mask")
    assert "8 of 16 patches" in mask.reason
    assert "probability 0.5" in result.of("bypassed-defense")[0].reason
    assert not linted(defended({"name": "mjp", "unknown": False})).of("readable-mask")


def test_a_jigsaw_that_seldom_rests_is_exact_when_it_does() -> None:
    assert predicts_exact(linted(defended({"name": "mjp", "ratio": 0.5, "probability": 0.999})))
    assert not predicts_exact(linted(defended({"name": "mjp", "ratio": 0.5, "probability": 1})))
    both = linted(defended({"name": "mjp", "ratio": 0.5, "probability": 0.999}, "gaussian_noise"))
    assert not predicts_exact(both)


def test_a_plain_chain_is_likely_to_be_inverted_layer_by_layer() -> None:
    chain = ["data.image_size=16", "model={name: convnet}"]
    assert severities(linted(*chain), "layer-by-layer") == ["likely"]
    assert not linted(*chain, "train.batch_size=2").of("layer-by-layer")
    assert not linted().of("layer-by-layer")


def test_a_linear_layer_before_a_relu_gives_whole_batches_away() -> None:
    mlp = ["data.image_size=16", "model={name: mlp, options: {hidden: [100]}}"]
    result = linted(*mlp, "train.batch_size=4")
    assert severities(result, "whole-batch") == ["likely"]
    assert "100 units" in result.of("whole-batch")[0].reason
    assert "spear is not among its attacks" in result.of("missing-attack")[0].reason
    for change in (
        ["train.batch_size=128"],
        ["train.batch_size=4", "train.upload=delta", "train.local_steps=2"],
        ["train.batch_size=4", defended("secure_aggregation")],
        ["train.batch_size=4", "model.options={hidden: [100], activation: tanh}"],
    ):
        assert not linted(*mlp, *change).of("whole-batch"), change
    assert not linted("train.batch_size=4").of("whole-batch")


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


def test_what_an_audit_would_miss_is_noted() -> None:
    assert not linted().of("missing-attack")
    (missing,) = linted("attacks=[{name: dlg}]").of("missing-attack")
    assert "patch_solve" in missing.reason
    assert linted("train.rounds=1").of("first-round-only")
    assert not linted().of("first-round-only")
    assert linted("threat={model: C, oracle_labels: true}").of("oracle-labels")
    assert not linted().of("oracle-labels")


def test_every_rule_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []
    assert len(RULES) <= len(NAMES)


def test_a_clear_picture_is_what_a_verdict_calls_one() -> None:
    assert rules.CLEAR_DB == RECOVERED_DB
