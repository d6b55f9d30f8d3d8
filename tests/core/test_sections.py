"""Sections: what their keys may be, and the names that become folders."""

from __future__ import annotations

import pytest

from fedsim.attacks import ATTACKS
from fedsim.core.errors import SpecError
from fedsim.core.learning import Update
from fedsim.core.sections import BASELINE, Component, Upload
from fedsim.core.spec import load_spec
from tests.conftest import small_spec


@pytest.mark.parametrize("wrong", ["-1", "1.5", ".inf"])
def test_shares_of_a_gpu_that_ray_cannot_give_are_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match="gpus_per_worker"):
        small_spec(f"engine={{kind: ray, gpus_per_worker: {wrong}}}")


@pytest.mark.parametrize(
    "override",
    [
        *(f"data.std=[0.5, {wrong}, 0.5]" for wrong in ("0", "-0.5", ".nan", ".inf")),
        *(f"data.mean=[0.5, 0.5, {wrong}]" for wrong in (".nan", "-.inf")),
        *(f"train.loss.label_smoothing={wrong}" for wrong in ("1", "-0.1", ".nan")),
        "train.loss.weights=[1, .inf]",
        "train.betas=[0.9, 1]",
        *(f"train.{key}=.inf" for key in ("lr", "weight_decay", "clip", "timeout", "patience")),
        "train.lr=.nan",
        "train.max_norm=.inf",
        "data.partition.alpha=.inf",
        "engine.job_silence=.inf",
        "engine.job_timeout=.nan",
        "engine.client_gpus=.inf",
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(SpecError, match=key) as caught:
        load_spec({}, [override])
    assert "\n" not in str(caught.value)


def test_a_third_kind_of_upload_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(SpecError, match=r"must be one of 'gradient' or 'delta'.*'gradient'"):
        load_spec({}, ["train.upload=gradiant"])
    with pytest.raises(ValueError, match="'weights' is not a valid Upload"):
        Update("weights", {})  # type: ignore[arg-type]
    assert [kind.sign for kind in Upload] == [1.0, -1.0]


@pytest.mark.parametrize(
    "title",
    ["", ".", "..", " ", "a/b", "../x", "a\\b", "a\nb", "a\0b", "x" * 201, "ü" * 101, "[red]"],
)
def test_a_title_that_cannot_name_a_folder_is_refused(title: str) -> None:
    with pytest.raises(SpecError, match=r"attacks\.0: the title .* letters, digits") as caught:
        load_spec({"attacks": [{"name": "patch_solve", "title": title}]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "..", "a/b", "package.module:..", "package.module:a/b"])
def test_a_name_that_leaves_the_folder_of_the_results_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is no name"):
        load_spec({"attacks": [{"name": name}]})


def test_the_title_of_the_baseline_is_its_own() -> None:
    with pytest.raises(SpecError, match="the title 'prior_only' is that of the baseline"):
        load_spec({"attacks": [{"name": "patch_solve", "title": "prior_only"}]})
    own = load_spec({"attacks": [{"name": "prior_only", "title": "prior_only"}]})
    assert own.attacks[0].is_baseline


def test_the_baseline_is_known_by_its_class_under_every_path() -> None:
    paths = (BASELINE, ATTACKS[BASELINE], ATTACKS[BASELINE].removeprefix("fedsim."))
    assert [Component(name=path, title="a guess").is_baseline for path in paths] == [True] * 3
    assert not Component(name="elsewhere:prior_only").is_baseline


def test_bounds_on_what_clients_may_send_have_defaults_that_older_runs_share() -> None:
    plain = load_spec({})
    assert plain.digest() == load_spec({}, ["train.patience=10"]).digest()
    assert (plain.train.max_norm, plain.train.max_examples) == (None, None)
    assert load_spec({}, ["train.patience=null"]).train.patience is None
    for wrong in ("train.patience=0.5", "train.max_norm=0", "train.max_examples=0"):
        with pytest.raises(SpecError, match=wrong.partition("=")[0]):
            load_spec({}, [wrong])


def test_the_learning_rate_of_a_round_follows_its_schedule() -> None:
    train = small_spec(
        "train={rounds: 4, lr: 0.1, round_schedule: {name: step, every: 2, factor: 0.5}}"
    ).train
    assert [train.rate(round_) for round_ in (1, 2, 3, 4)] == [0.1, 0.1, 0.05, 0.05]


def test_a_step_has_as_many_pictures_as_it_accumulates() -> None:
    assert small_spec("train={batch_size: 3, accumulate: 4}").train.step_size == 12


def test_only_fedprox_pulls_back() -> None:
    options = "strategy_options: {proximal_mu: 0.1}"
    assert small_spec(f"train={{strategy: FedProx, {options}}}").train.proximal == 0.1
    assert small_spec(f"train={{strategy: FedAvg, {options}}}").train.proximal == 0.0
