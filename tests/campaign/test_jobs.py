"""Jobs: one attack on one observation, cut short and gone on with; what its View holds."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.campaign.jobs import Handout, Job, perform
from fedsim.campaign.plan import victims
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Secrets, View
from fedsim.core.learning import Update
from fedsim.core.observation import Observation, Public, write_observation, write_weights
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec, TrainSpec, Upload
from tests.conftest import small_spec
from tests.faults import Keeps
from tests.staging import TINY, attack, observe, photos


class StoppedError(Exception):
    pass


def test_a_long_attack_goes_on_where_its_worker_died(small_run: Run, tmp_path: Path) -> None:
    params = {"steps": 20, "checkpoint_seconds": 0.0}
    component = Component(name="inverting_gradients", **params)
    round_, client = victims(small_run.spec)[0]
    handout = Handout(small_run.spec.threat, 0, "cpu")

    def job(folder: str) -> Job:
        root = tmp_path / folder
        return Job(small_run.observations, root, round_, client, component, "ig", 0)

    def stops(done: int, total: int, loss: float | None = None) -> None:
        if done >= 12:
            raise StoppedError

    whole = perform(job("whole"), handout, Secrets())
    with pytest.raises(StoppedError):
        perform(job("cut"), handout, Secrets(), stops)
    assert job("cut").notebook.is_file()
    again = perform(job("cut"), handout, Secrets())
    assert any("resumed at step" in note for note in again.notes)
    assert torch.equal(again.images, whole.images)
    assert not job("cut").notebook.exists()


@pytest.mark.parametrize("how", ["copy", "deepcopy", "fork", "page"])
def test_what_an_attack_reads_in_a_roundabout_way_is_in_its_ledger(
    small_run: Run, tmp_path: Path, how: str
) -> None:
    component = Component(name="tests.pretenders:Roundabout", how=how)
    job = Job(small_run.observations, tmp_path, *victims(small_run.spec)[0], component, "r", 0)
    handout = Handout(small_run.spec.threat, 0, "cpu")
    if how == "page":
        with pytest.raises(ZeroDivisionError):
            perform(job, handout, Secrets())
    assert "update" in perform(job, handout, Secrets()).ledger


@pytest.mark.parametrize(
    ("hoard", "words"),
    [
        ({"pictures": 4096}, "returned 4096 pictures, and at most 1 stand behind the update"),
        ({"labels": 8}, "returned 8 labels, and at most 1 stand behind the update"),
    ],
)
def test_more_guesses_than_pictures_are_a_failure(
    small_run: Run, tmp_path: Path, hoard: dict[str, int], words: str
) -> None:
    component = Component(name="tests.faults:Hoards", **hoard)
    job = Job(small_run.observations, tmp_path, *victims(small_run.spec)[0], component, "h", 0)
    with pytest.raises(AttackError, match=words):
        perform(job, Handout(small_run.spec.threat, 0, "cpu"), Secrets())


@pytest.mark.parametrize(
    "train",
    [
        TrainSpec(batch_size=2),
        TrainSpec(batch_size=2, upload=Upload.DELTA, local_steps=3),
        TrainSpec(batch_size=2, upload=Upload.DELTA, local_epochs=1),
    ],
)
@pytest.mark.parametrize("name", ["prior_only", "patch_solve", "inverting_gradients"])
def test_attacks_return_no_more_than_the_protocol_lets_one_assume(
    name: str, train: TrainSpec
) -> None:
    observation = observe(TINY, *photos(32, [70, 20]), train)
    params = {"steps": 2} if name == "inverting_gradients" else {}
    result = attack(observation, name, threat="C", **params)
    assert len(result.images) <= observation.pictures
    assert result.labels is None or len(result.labels) <= observation.pictures


# -- what a View holds --------------------------------------------------------------------------

SEED = 987654321
FACTS: dict[str, set[Any]] = {  # numbers and words that are found where the field is
    "architecture": {"vit_tiny_patch16_224"},
    "normalisation": {0.111, 0.222},
    "batch_size": {77003},
    "learning_rate": {0.0123},
    "optimizer": {0.0789, "adamw"},
    "local_steps": {77005},
    "defenses": {0.0456, "gaussian_noise"},
}
LABELS = torch.tensor([41, 42, 43])


def told_spec(threat: str) -> Spec:
    """A spec whose every number is found again."""
    return small_spec(
        f"seed={SEED}",
        "data={image_size: 32, clients: 4}",
        "data.mean=[0.111, 0.111, 0.111]",
        "data.std=[0.222, 0.222, 0.222]",
        "train={rounds: 1, batch_size: 77003, local_steps: 77005, upload: delta, lr: 0.0123, "
        "optimizer: adamw, weight_decay: 0.0789}",
        "defenses=[{name: gaussian_noise, std: 0.0456}]",
        f"threat={threat}",
    )


def kept_view(spec: Spec, root: Path) -> View:
    """The View that an attack of this spec is handed on an observation of its own."""
    Keeps.views.clear()
    update = Update(Upload.DELTA, {"head.weight": torch.ones(2)}, {}, 3, 0.5)
    write_weights(root, 1, {"head.weight": torch.zeros(2)})
    write_observation(root, 1, 0, update, Public.of(spec, 8))
    job = Job(root, root / "results", 1, 0, Component(name="tests.faults:Keeps"), "keeps", 0)
    granted = "oracle_labels" if spec.threat.oracle_labels else None
    secrets = Secrets(LABELS if granted else None)
    perform(job, Handout(spec.threat, SEED, "cpu", torch.full((1, 3), 0.987)), secrets)
    return Keeps.views.pop()


def held(start: object) -> Iterator[object]:
    """Everything that can be reached from an object, through closures and partials as well; code
    and the modules it stands in are no part of it."""
    seen, waiting = set[int](), [start]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(
            found, type | types.ModuleType | types.BuiltinFunctionType | types.CodeType
        ):
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, types.FunctionType):
            waiting += [cell.cell_contents for cell in found.__closure__ or ()]
            waiting += [found.__defaults__, found.__kwdefaults__, found.__dict__]
        else:
            waiting += gc.get_referents(found)


def facts_in(view: View) -> set[Any]:
    """The numbers, words and kinds of things that a View holds."""
    facts: set[Any] = set()
    for thing in held(view):
        if isinstance(thing, int | float | str):
            facts.add(thing)
        elif isinstance(thing, torch.Tensor):
            facts |= set(thing.flatten().tolist())
        elif isinstance(thing, Observation | Public):
            facts.add(type(thing).__name__)
    return facts


@pytest.mark.parametrize(
    ("threat", "granted"),
    [
        ("A", set()),
        ("B", {"architecture", "normalisation", "batch_size"}),
        ("C", FACTS.keys()),
        ("{model: C, withhold: [learning_rate]}", FACTS.keys() - {"learning_rate"}),
        ("{model: C, withhold: [normalisation]}", FACTS.keys() - {"normalisation"}),
        ("{model: C, withhold: [optimizer]}", FACTS.keys() - {"optimizer"}),
        ("{model: C, withhold: [defenses]}", FACTS.keys() - {"defenses"}),
        ("{model: C, withhold: [architecture]}", FACTS.keys() - {"architecture"}),
    ],
)
def test_a_view_holds_what_is_granted_and_nothing_else(
    threat: str, granted: set[str], tmp_path: Path
) -> None:
    facts = facts_in(kept_view(told_spec(threat), tmp_path))
    for field, signs in FACTS.items():
        if field == "architecture" and "defenses" not in granted:
            continue  # the model itself is there then, and not its name
        assert (signs <= facts) == (field in granted), field
        assert field in granted or not signs & facts, field
    assert not facts & {SEED, "Observation", "Public", *LABELS.tolist()}
    assert not any(isinstance(fact, float) and abs(fact - 0.987) < 1e-6 for fact in facts)


def test_the_search_would_find_what_is_hidden_in_a_closure(tmp_path: Path) -> None:
    view = kept_view(told_spec("{model: A, oracle_labels: true}"), tmp_path)
    assert set(LABELS.tolist()) <= facts_in(view), "they are granted here"
    assert not facts_in(view) & {0.0123, SEED}
    secret = {"rate": 0.0123}
    view._known["traffic"] = lambda: secret
    assert 0.0123 in facts_in(view)


def test_the_views_of_the_traffic_hold_no_more(tmp_path: Path) -> None:
    view = kept_view(told_spec("A"), tmp_path)
    other = view.traffic.open(1, 0)
    assert other.update.num_examples == 3
    for facts in (facts_in(view), facts_in(other)):
        assert not facts & {SEED, 0.0123, 0.0456, "gaussian_noise", "Observation", "Public"}


def test_whoever_knows_the_model_but_not_the_defenses_gets_the_model_they_leave(
    tmp_path: Path,
) -> None:
    spec = small_spec("defenses=[{name: mjp, ratio: 0.4321, dal: linear}]", "threat=B")
    view = kept_view(spec, tmp_path)
    factory, _ = view._known["architecture"]
    first, second = factory(), factory()
    assert "unk_embed" in dict(first.named_parameters())
    assert first is not second
    assert 0.4321 not in facts_in(view)
