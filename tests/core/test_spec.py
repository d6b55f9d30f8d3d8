"""The spec: defaults that work, overrides that reach, errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.attacks import ATTACKS
from fedsim.clients.shards import shards_of
from fedsim.core.errors import SpecError
from fedsim.core.learning import Update
from fedsim.core.models import build_model
from fedsim.core.spec import BASELINE, Component, Spec, Upload, load_spec
from tests.conftest import small_spec


def test_the_defaults_are_a_valid_spec() -> None:
    assert load_spec({}) == Spec()


def test_a_letter_is_a_threat_model() -> None:
    assert load_spec({"threat": "B"}).threat.model == "B"
    assert load_spec({"threat": "B"}, ["threat.oracle_labels=true"]).threat.oracle_labels


def test_overrides_are_yaml_and_reach_into_sections() -> None:
    spec = load_spec(
        {"train": {"rounds": 2}},
        ["train.rounds=5", "attacks=[{name: patch_solve, ridge: 0.1}]", "model.options={}"],
    )
    assert spec.train.rounds == 5
    assert spec.attacks[0].params == {"ridge": 0.1}


def test_a_saved_spec_loads_as_the_same_spec(tmp_path: Path) -> None:
    spec = load_spec({}, ["train.rounds=3", "defenses=[{name: gaussian_noise, std: 0.1}]"])
    file = tmp_path / "spec.yaml"
    file.write_text(spec.to_yaml())
    assert load_spec(file) == spec
    assert load_spec(file).digest() == spec.digest()


def test_where_it_runs_is_not_what_it_is() -> None:
    assert load_spec({}).digest() == load_spec({}, ["engine.kind=inline", "name=other"]).digest()
    assert load_spec({}).digest() != load_spec({}, ["seed=1"]).digest()
    assert load_spec({}).digest() == load_spec({}, ["train.rounds=1"]).digest()  # the default
    assert load_spec({}).digest() != load_spec({}, ["train.rounds=2"]).digest()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.round=3", "did you mean 'rounds'"),
        ("data.partition.alhpa=1", "did you mean 'alpha'"),
        ("data.partition.kind=dirichle", "'dirichlet'"),
        ("train.rounds=many", "train.rounds"),
        ("threat=Z", "'A', 'B', 'C'"),
        ("train.local_steps=3", "use upload: delta"),
        ("train.clients_per_round=99", "data.clients is 8"),
        ("audit.rounds=[4]", "train.rounds is 1"),
        ("attacks=[{}]", "name"),
        ("train", "write key.sub=value"),
        ("train.rounds.deep=1", "not a section"),
        ("data.path=[", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_one_sentence_that_says_what_is_right(
    override: str, expected: str
) -> None:
    source = {"train": {"rounds": 1}}
    with pytest.raises(SpecError, match=r"\w") as caught:
        load_spec(source, [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text, expected in [
        ("trian: {}", "did you mean 'train'"),
        ("- 1", "a mapping"),
        ("a: [", "line"),
    ]:
        file.write_text(text)
        with pytest.raises(SpecError) as caught:
            load_spec(file)
        assert "mine.yaml" in str(caught.value)
        assert expected in str(caught.value)
    with pytest.raises(SpecError, match="no spec file"):
        load_spec(tmp_path / "absent.yaml")


@pytest.mark.parametrize("wrong", ["-1", "1.5", ".inf"])
def test_shares_of_a_gpu_that_ray_cannot_give_are_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match="gpus_per_worker"):
        small_spec(f"engine={{kind: ray, gpus_per_worker: {wrong}}}")


@pytest.mark.parametrize("seed", [2**63, 10**40, -1])
def test_a_seed_that_no_generator_takes_is_one_sentence(seed: int) -> None:
    with pytest.raises(SpecError, match="seed: input should be"):
        load_spec({}, [f"seed={seed}"])


def test_the_largest_seed_deals_and_draws() -> None:
    spec = small_spec(f"seed={2**63 - 1}", "data.partition.kind=dirichlet", "data.clients=2")
    assert len(shards_of(spec.data, spec.seed)) == 2
    assert build_model(
        spec.model, image_size=spec.data.image_size, num_classes=2, seed=spec.seed
    ).training


@pytest.mark.parametrize(
    "override",
    [
        *(f"data.std=[0.5, {wrong}, 0.5]" for wrong in ("0", "-0.5", ".nan", ".inf")),
        *(f"data.mean=[0.5, 0.5, {wrong}]" for wrong in (".nan", "-.inf")),
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


def test_every_path_of_a_spec_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    spec = load_spec(
        {},
        [
            "data.path=data",
            "model.checkpoint=model.pth",
            "threat={model: D, surrogate: {path: other}, prior: {checkpoint: prior.pth},"
            " generator: {checkpoint: generator.safetensors}}",
        ],
    )
    threat = spec.threat
    assert threat.surrogate is not None
    assert threat.prior is not None
    assert threat.generator is not None
    paths = [spec.data.path, spec.model.checkpoint, threat.surrogate.path]
    paths += [threat.prior.checkpoint, threat.generator.checkpoint]
    assert [str(tmp_path / name) for name in ("data", "model.pth", "other")] == paths[:3]
    assert [str(tmp_path / name) for name in ("prior.pth", "generator.safetensors")] == paths[3:]


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
