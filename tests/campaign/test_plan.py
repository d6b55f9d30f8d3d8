"""The plan of a campaign: who is attacked by what, and what is refused before any round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsim.attacks.generators import create_generator, save_generator
from fedsim.audit.stages import audit
from fedsim.campaign.plan import (
    awaits_rounds,
    baseline_label,
    jobs_of,
    labelled_attacks,
    prepare,
    taught_rounds,
    victims,
)
from fedsim.clients.dealing import PUBLIC, read_public, write_public
from fedsim.core.errors import AttackError, NotGranted, SpecError
from fedsim.core.run import Run
from fedsim.core.spec import BASELINE, AuditSpec, Component, Spec, load_spec
from tests.clients.conftest import without_data
from tests.conftest import small_spec

GENERATOR = {"image_size": 16, "latent_size": 6, "width": 4}


def test_only_who_weighs_updates_against_others_of_the_round_waits_for_it() -> None:
    lists = "threat={model: C, candidates: 4}"
    weighing = "attacks=[{name: membership, others: 2}]"
    assert awaits_rounds(small_spec(weighing, lists))
    assert not awaits_rounds(small_spec("attacks=[{name: membership}]", lists))
    assert not awaits_rounds(small_spec("attacks=[{name: joint}]", lists))
    withheld = "threat={model: C, candidates: 4, withhold: [traffic]}"
    assert not awaits_rounds(small_spec(weighing, withheld))


def test_a_generator_of_another_size_is_refused_before_any_round(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    save_generator(file, "dcgan", GENERATOR, create_generator("dcgan", GENERATOR))
    threat = f"threat={{model: D, generator: {{checkpoint: {file}}}}}"
    with pytest.raises(Exception, match="makes images of 16 pixels and the clients' have 32"):
        prepare(small_spec("attacks=[{name: gias}]", threat))
    weak = f"threat={{model: C, generator: {{checkpoint: {file}}}}}"
    with pytest.raises(SpecError, match="threat C grants no generator"):
        prepare(small_spec(weak))


def test_a_generator_of_the_clients_own_data_is_refused(tmp_path: Path) -> None:
    options = {**GENERATOR, "image_size": 32}
    file = tmp_path / "g.safetensors"
    own = {"name": "photos", "path": None}
    save_generator(file, "dcgan", options, create_generator("dcgan", options), trained_on=own)
    threat = f"threat={{model: D, generator: {{checkpoint: {file}}}}}"
    with pytest.raises(SpecError, match="trained on the clients' own data"):
        prepare(small_spec(threat))


def test_a_generator_of_the_clients_own_folder_is_refused_by_any_way_to_it(tmp_path: Path) -> None:
    for number in range(24):
        folder = tmp_path / "own" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (10 * number, 0, 0)).save(folder / f"{number}.png")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    options, file = {**GENERATOR, "image_size": 32}, tmp_path / "g.safetensors"
    threat = f"threat={{model: D, generator: {{checkpoint: {file}}}}}"
    spec = small_spec("data.name=imagefolder", f"data.path={tmp_path / 'own'}", threat)
    for way in (f"{tmp_path}/link", f"{tmp_path}/own/../own"):
        own = {"name": "imagefolder", "path": way}
        save_generator(file, "dcgan", options, create_generator("dcgan", options), trained_on=own)
        with pytest.raises(SpecError, match="trained on the clients' own data"):
            prepare(spec)


def test_a_server_plans_without_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec()
    plan = prepare(spec)
    write_public(tmp_path / PUBLIC, spec)
    without_data(monkeypatch)
    blind = prepare(spec, read_public(tmp_path / PUBLIC, spec))
    assert blind.public == plan.public
    assert all(torch.equal(blind.initial[name], plan.initial[name]) for name in plan.initial)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("threat={model: C, prior: {name: efficientnet_lite0}}", "grants no prior network"),
        ("threat={model: C, withhold: [batchsize]}", "batch_size"),
    ],
)
def test_a_threat_section_that_contradicts_itself_is_refused(
    override: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=expected):
        audit(small_spec(override), tmp_path / "run")


@pytest.mark.parametrize("name", ["gradvit", "grad_inversion", "dlg", "row_space", "rgap"])
def test_an_attack_the_threat_model_does_not_carry_is_refused_before_any_round(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(NotGranted, match="architecture"):
        audit(small_spec("threat=A", f"attacks=[{{name: {name}}}]"), tmp_path / "run")
    assert not (tmp_path / "run" / "observations").exists()


def test_victims_are_chosen_before_any_result_and_spread_over_the_rounds() -> None:
    spec = small_spec("train.rounds=3", "audit.victims=3")
    chosen = victims(spec)
    assert [round_ for round_, _ in chosen] == [1, 2, 3]
    assert all(client in spec.cohort(round_) for round_, client in chosen)
    assert len(victims(small_spec())) == 4


def test_an_attack_listed_twice_gets_two_names() -> None:
    spec = small_spec("attacks=[{name: patch_solve}, {name: patch_solve, ridge: 0.1}]")
    labels = [label for label, _ in labelled_attacks(spec)]
    assert labels == ["patch_solve", "patch_solve-2", "prior_only"]


def test_a_title_names_an_attack_in_the_tables() -> None:
    attacks = "[{name: patch_solve, title: no snap, snap: false}, {name: patch_solve}]"
    spec = load_spec({}, [f"attacks={attacks}"])
    assert [label for label, _ in labelled_attacks(spec)][:2] == ["no snap", "patch_solve"]
    assert spec.attacks[0].params == {"snap": False}


@pytest.mark.parametrize(
    ("titles", "labels"),
    [
        (["ig-2", "ig", "ig"], ["ig-2", "ig-3", "ig-4"]),
        (["ig", "ig", "ig-2"], ["ig", "ig-2", "ig-2-2"]),
        (["a-2", "a-3", "a", "a"], ["a-2", "a-3", "a-4", "a-5"]),
    ],
)
def test_titles_that_look_like_numbered_ones_collide_with_none(
    titles: list[str], labels: list[str]
) -> None:
    spec = Spec(attacks=[Component(name="patch_solve", title=title) for title in titles])
    assert [label for label, _ in labelled_attacks(spec)] == [*labels, BASELINE]


PARTS = st.sampled_from(["a", "a-2", "a-3", "a-2-2", "prior_only-2", None])


@given(st.lists(PARTS, max_size=8), st.sampled_from(["x", "y:a", "y:prior_only", BASELINE]))
@settings(max_examples=200, deadline=None)
def test_every_label_is_given_once_and_that_of_the_baseline_to_it_alone(
    titles: list[str | None], name: str
) -> None:
    spec = Spec(attacks=[Component(name=name, title=title) for title in titles])
    labelled = labelled_attacks(spec)
    assert len({label for label, _ in labelled}) == len(labelled)
    assert sum(component.is_baseline for _, component in labelled) == 1
    assert all(component.is_baseline for label, component in labelled if label == BASELINE)
    assert dict(labelled)[baseline_label(spec)].is_baseline


def test_the_baseline_is_tried_once_whatever_it_is_called() -> None:
    attacks = [Component(name="x"), Component(name=BASELINE, title="a guess")]
    spec = Spec(attacks=attacks, audit=AuditSpec(trials=3, victims=1))
    jobs = jobs_of(Run("nowhere"), spec, victims(spec))
    assert [(job.label, job.trial) for job in jobs] == [
        *(("x", 0), ("x", 1), ("x", 2)),
        ("a guess", 0),
    ]


@pytest.mark.parametrize(
    ("model", "change", "attack", "words"),
    [
        ("resnet18", "", "patch_solve", "Vision Transformers"),
        ("resnet18", "", "row_space", "Vision Transformers"),
        ("resnet18", "", "april", "Vision Transformers"),
        ("convnet", "train.upload=delta", "rgap", "not on a weight delta"),
        ("resnet18", "", "rgap", "plain chains"),
        ("convnet", "", "spear", "begins with a linear layer"),
        ("mlp", "train={upload: delta, local_steps: 2}", "spear", "a delta of 2 steps"),
        ("vit_tiny_patch16_224", "", "april_closed", "plain_first_block"),
        ("convnet", "", "deep_inversion, labels: joint", "of given labels"),
        ("convnet", "", "dlg, engine: first_order, precision: float16", "mixed precision"),
        ("vit_tiny_patch16_224", "", "april, without: [embeddings]", "leave out here"),
    ],
)
def test_an_attack_that_cannot_work_is_told_before_any_round(
    model: str, change: str, attack: str, words: str
) -> None:
    overrides = [f"model={{name: {model}}}", f"attacks=[{{name: {attack}}}]", change]
    spec = small_spec(*[override for override in overrides if override])
    with pytest.raises(SpecError, match="cannot work here") as told:
        prepare(spec)
    assert words in str(told.value)
    assert "\n" not in str(told.value)
    prepare(spec, willing=True)  # where it declines when it is asked


SEVERAL = "train={upload: delta, local_steps: 2, rounds: 1}"
MANY = "train={upload: delta, local_steps: 20, rounds: 1}"


@pytest.mark.parametrize(
    ("threat", "train", "attack", "words"),
    [
        ("B", SEVERAL, "dlg", "the size of a gradient cannot be told"),
        ("B", SEVERAL, "inverting_gradients, local: unroll", "optimiser and learning rate"),
        ("C", SEVERAL, "gradvit, preset: paper, local: surrogate", "size of a gradient"),
        ("C", MANY, "gradvit, preset: paper", "size of a gradient"),
        ("B", SEVERAL, "inverting_gradients", ""),
        ("B", SEVERAL, "deep_inversion", ""),
        ("C", SEVERAL, "dlg", ""),
        ("C", MANY, "gradvit", ""),
    ],
)
def test_a_delta_that_an_attack_cannot_match_is_told_before_any_round(
    threat: str, train: str, attack: str, words: str
) -> None:
    spec = small_spec(f"threat={threat}", train, f"attacks=[{{name: {attack}}}]")
    if words:
        with pytest.raises(AttackError, match=f"cannot work here: .*{words}"):
            prepare(spec)
    prepare(spec, willing=bool(words))


def test_who_learns_from_pictures_of_its_own_is_taught_for_attacked_rounds_alone() -> None:
    threat = "threat={model: D, surrogate: {name: lfw_subset}}"
    attacks = "attacks=[{name: giml}, {name: inverter}]"
    spec = small_spec(threat, attacks, "train.rounds=4", "audit={rounds: [2, 4]}")
    giml, inverter = spec.attacks
    assert taught_rounds(giml, spec) == [1, 2, 3, 4]
    assert taught_rounds(inverter, spec) == [2, 4]
    alone = small_spec(
        threat, "attacks=[{name: inverter}]", "train.rounds=1", "train.clients_per_round=1"
    )
    assert prepare(alone).spec.attacks  # one observation is enough
