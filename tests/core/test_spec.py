"""The spec: defaults that work, overrides that reach, errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.clients.shards import shards_of
from fedsim.core.errors import SpecError
from fedsim.core.models import build_model
from fedsim.core.spec import Spec, load_spec
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


def test_a_spec_from_before_it_had_these_keys_is_the_same_spec() -> None:
    train = "rounds: 2, upload: delta, local_epochs: 2, optimizer: adamw, strategy: FedProx"
    options = "strategy_options: {proximal_mu: 1.0}"
    spec = load_spec({}, ["seed=1", f"train={{{train}, {options}}}"])
    assert spec.digest() == "ce1a0230fe24"


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
        ("train.schedule={nam: cosine}", "unknown key 'train.schedule.nam' (did you mean 'name'?)"),
        ("train.loss.label_smothing=0.1", "did you mean 'label_smoothing'"),
        ("train.schedule.name=cosin", "'cosine'"),
        ("train.schedule.name=cosine", "use upload: delta"),
        ("train.precision=half", "'bfloat16'"),
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
