"""The inverter: a network learned on simulated clients, in lessons on the workers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.attacks import create_attack
from fedsim.attacks.inverter import Inverter
from fedsim.audit.stages import audit
from fedsim.campaign.jobs import Handout, Job, observed_by, traffic_of
from fedsim.campaign.plan import (
    after_lessons,
    jobs_of,
    lessons_of,
    load_surrogate,
    observed_rounds,
    prepare,
)
from fedsim.clients.data import ImageSet
from fedsim.core.attack import Learner, Reconstruction, no_progress
from fedsim.core.defense import Defense
from fedsim.core.errors import AttackError, NotGranted
from fedsim.core.knowledge import Traffic, View, granted_by
from fedsim.core.learning import Update
from fedsim.core.run import Run
from fedsim.core.spec import DataSpec, Spec, load_spec

CPU = torch.device("cpu")
TINY = {"clients": 96, "entries": 128, "width": 32, "epochs": 8, "batch": 16, "lr": 5e-3}


class Colours(ImageSet):
    """Pictures of one colour each, a little noisy."""

    seed = 0

    def __init__(self, data: DataSpec, split: str):
        coin = np.random.default_rng([self.seed, split == "train"])
        self.classes = ("a", "b", "c")
        self.labels = coin.integers(0, 3, 64)
        colours = coin.uniform(0.1, 0.9, (64, 3, 1, 1))
        noise = coin.normal(0, 0.02, (64, 3, data.image_size, data.image_size))
        self._pictures = torch.from_numpy((colours + noise).clip(0, 1)).float()

    def image(self, index: int) -> Tensor:
        return self._pictures[index]


class OtherColours(Colours):
    seed = 1


@dataclass(frozen=True)
class Spy(Defense):
    """Uploads signs, and counts how often."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        COINS.append(int(torch.randint(2**62, (), generator=rng)))
        return replace(update, tensors={n: t.sign() for n, t in update.tensors.items()})


COINS: list[int] = []


def spec_of(*overrides: str, **params: object) -> Spec:
    attack = json.dumps({"name": "inverter", **TINY, **params})
    small = [
        f"data={{name: '{__name__}:Colours', image_size: 8, clients: 4}}",
        "model={name: convnet, options: {channels: [4, 6]}}",
        "train={rounds: 1, batch_size: 1, evaluate: false}",
        f"threat={{model: D, surrogate: {{name: '{__name__}:OtherColours'}}}}",
        f"attacks=[{attack}]",
        "audit={gallery: 0}",
        "engine={kind: inline, device: cpu}",
    ]
    return load_spec({}, [*small, *overrides])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(spec_of(), tmp_path_factory.mktemp("inverter") / "run")


def traffic(run: Run) -> Traffic:
    handout = Handout(run.spec.threat, 0, "cpu", load_surrogate(run.spec))
    return traffic_of(run.observations, handout, 1, seed=5)


def learned(run: Run, memory: Path, progress=no_progress, **params: object) -> bytes:
    """The network of the first round, learned in this folder."""
    attack = create_attack("inverter", **{**TINY, **params})
    assert isinstance(attack, Learner)
    attack.learn(traffic(run), 1, memory, seed=3, device=CPU, progress=progress)
    return (memory / "round-0001.safetensors").read_bytes()


def memory_of(run: Run) -> Path:
    (memory,) = run.learned.iterdir()
    return memory


def notes_of(run: Run) -> str:
    path = sorted((run.reconstructions / "inverter").rglob("*.safetensors"))[0]
    return " ".join(Reconstruction.load(path).notes)


def test_it_learns_the_colour_of_pictures_it_never_saw(run: Run) -> None:
    assert "beats their mean picture" in notes_of(run)
    scores = run.scores.groupby("attack")["psnr"].mean()
    assert scores["inverter"] > scores["prior_only"] + 3
    (lesson,) = memory_of(run).glob("lesson-*.json")
    assert json.loads(lesson.read_text())["steps"] == 48


def test_the_memory_keeps_the_network_and_its_pages_are_gone(run: Run) -> None:
    names = {path.name for path in memory_of(run).iterdir()}
    assert names == {"lesson-0001.json", "round-0001.safetensors", "samples.png"}


def test_the_ledger_says_what_it_rests_on_and_that_no_traffic_was_read(run: Run) -> None:
    verdict = next(v for v in run.summary["verdicts"] if v["attack"] == "inverter")
    assert {"surrogate", "weights", "update", "architecture"} <= set(verdict["ledger"])
    assert "traffic" not in verdict["ledger"]
    attack = Inverter()
    assert set(verdict["ledger"]) <= attack.needs | attack.uses


@pytest.mark.parametrize("at", [64, 96 + 48])
def test_a_lesson_that_was_cut_goes_on_to_the_same_numbers(
    run: Run, tmp_path: Path, at: int
) -> None:
    whole = learned(run, tmp_path / "whole")

    def cut(done: int, total: int, loss: float | None = None) -> None:
        if done >= at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learned(run, tmp_path / "cut", cut)
    assert not (tmp_path / "cut" / "round-0001.safetensors").exists()
    assert learned(run, tmp_path / "cut") == whole


def test_a_lesson_that_is_resumed_takes_no_step_twice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.attacks.inverting.training._PAGE", 10)
    whole = learned(run, tmp_path / "whole")
    told: list[int] = []

    def cut(done: int, total: int, loss: float | None = None) -> None:
        told.append(done)
        if done == 96 + 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learned(run, tmp_path / "cut", cut)
    told.clear()
    assert learned(run, tmp_path / "cut", lambda done, *_: told.append(done)) == whole
    assert told == [96 + step for step in (30, 40, 48)]


def test_another_seed_another_network(run: Run, tmp_path: Path) -> None:
    attack = Inverter(**TINY)
    for seed in (3, 4):
        attack.learn(
            traffic(run), 1, tmp_path / str(seed), seed=seed, device=CPU, progress=no_progress
        )
    one, two = (tmp_path / str(s) / "round-0001.safetensors" for s in (3, 4))
    assert one.read_bytes() != two.read_bytes()
    assert learned(run, tmp_path / "again") == one.read_bytes()


def test_simulated_clients_defend_themselves_as_declared_by_fresh_coins(tmp_path: Path) -> None:
    spec = spec_of(f"defenses=[{{name: '{__name__}:Spy'}}]", clients=32)
    COINS.clear()
    run = audit(spec, tmp_path / "run")
    assert len(COINS) >= 32 + 4
    assert len(set(COINS)) >= 32 + 4  # no two clients throw the same
    verdict = next(v for v in run.summary["verdicts"] if v["attack"] == "inverter")
    assert "defenses" in verdict["ledger"]
    COINS.clear()
    naive = learned(run, tmp_path / "naive", clients=32, adaptive=False)
    assert not COINS
    assert naive != learned(run, tmp_path / "adaptive", clients=32)


def test_what_nobody_uploads_is_not_missed(tmp_path: Path) -> None:
    run = audit(spec_of("defenses=[{name: withheld, parts: [head]}]"), tmp_path / "run")
    assert "not uploaded" not in notes_of(run)
    inverted = run.scores[run.scores["attack"] == "inverter"]
    assert inverted["label_recovered"].isna().all()  # nothing shows the labels
    assert inverted["psnr"].notna().all()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["threat=D"], "say where they are: threat.surrogate.name"),
        (["train.batch_size=5"], "up to 4 pictures apart, and 5 stand behind"),
        (["train={upload: delta, local_steps: 3, batch_size: 2}"], "and 6 stand behind"),
        (["train={upload: delta, local_epochs: 1}"], "not epochs"),
        (["train.augment=[{name: MixUp}]"], "no mixed pictures"),
    ],
)
def test_it_refuses_before_any_round_what_it_does_not_simulate(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(AttackError, match=words):
        prepare(spec_of(*overrides))


def test_it_refuses_a_server_that_sends_every_client_weights_of_its_own() -> None:
    threat = f"threat={{model: G, surrogate: {{name: '{__name__}:OtherColours'}}}}"
    with pytest.raises(AttackError, match="may send every client its own"):
        prepare(spec_of(threat, "server.manoeuvre.name=fishing"))


def test_without_pictures_of_its_own_it_is_not_granted() -> None:
    with pytest.raises(NotGranted, match=r"surrogate .*; threat D does"):
        prepare(spec_of("threat=C"))


def test_too_few_pictures_are_declined(run: Run, tmp_path: Path) -> None:
    surrogate = load_surrogate(run.spec)
    assert surrogate is not None
    handout = Handout(run.spec.threat, 0, "cpu", surrogate[:5])
    few = traffic_of(run.observations, handout, 1, seed=5)
    with pytest.raises(AttackError, match="5 surrogate pictures are too few"):
        Inverter(**TINY).learn(few, 1, tmp_path, seed=3, device=CPU, progress=no_progress)


def view_at(run: Run, memory: Path | None) -> View:
    view = traffic(run).open(1, 0)
    view._desk = replace(view._desk, memory=memory, learned_from="surrogate")
    return view


def test_it_attacks_only_what_it_has_learned_for(run: Run, tmp_path: Path) -> None:
    attack = Inverter(**TINY)
    with pytest.raises(AttackError, match="only after it has learned"):
        attack.reconstruct(view_at(run, None), device=CPU, progress=no_progress)
    with pytest.raises(AttackError, match="no network for round 1"):
        attack.reconstruct(view_at(run, tmp_path), device=CPU, progress=no_progress)
    view = view_at(run, memory_of(run))
    view._known["batch_size"] = 2  # a cohort of which fewer stayed
    with pytest.raises(AttackError, match=r"2 pictures stand behind this update, and .* for 1"):
        attack.reconstruct(view, device=CPU, progress=no_progress)
    view = view_at(run, memory_of(run))
    view._known["weights"] = {n: t + 1 for n, t in view.weights.items()}
    with pytest.raises(AttackError, match="was sent other weights"):
        attack.reconstruct(view, device=CPU, progress=no_progress)


@pytest.mark.slow
def test_every_attacked_round_is_learned_anew_and_no_other_is_observed(tmp_path: Path) -> None:
    spec = spec_of("train.rounds=3", "audit={rounds: [1, 3], gallery: 0}", clients=32, epochs=2)
    assert observed_rounds(spec) == [1, 3]
    run = audit(spec, tmp_path / "run")
    assert [lesson.round for lesson in lessons_of(run, spec, [1, 2, 3])] == [1, 3]
    first, last = (memory_of(run) / f"round-000{n}.safetensors" for n in (1, 3))
    assert first.read_bytes() != last.read_bytes()
    assert set(run.scores[run.scores["attack"] == "inverter"]["round"]) == {1, 3}


@pytest.mark.slow
def test_two_pictures_behind_one_update_come_back_with_their_labels(tmp_path: Path) -> None:
    run = audit(spec_of("train.batch_size=2", clients=512, epochs=8), tmp_path / "run")
    scores = run.scores.groupby("attack")["psnr"].mean()
    assert len(run.scores[run.scores["attack"] == "inverter"]) == 8
    assert scores["inverter"] > scores["prior_only"] + 1


@pytest.mark.slow
def test_local_steps_are_simulated(tmp_path: Path) -> None:
    steps = "train={upload: delta, local_steps: 2, batch_size: 1, evaluate: false}"
    run = audit(spec_of(steps, clients=32), tmp_path / "run")
    assert len(run.scores[run.scores["attack"] == "inverter"]) == 8


def test_a_job_reads_its_own_observation_and_waits_for_the_lesson_of_its_round(run: Run) -> None:
    job = next(job for job in jobs_of(run, run.spec, [(1, 2)]) if job.label == "inverter")
    assert isinstance(job, Job)
    waiting = after_lessons(replace(job, round=5), run.learned, [2, 5])
    assert waiting.requires == run.learned / Inverter(**TINY).learner / "lesson-0002.json"
    assert observed_by(job, granted_by(run.spec.threat)) == [job.observation]
