"""GIML: learning a generator from the traffic, in lessons on the workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.attacks.generators import generate, load_generator
from fedsim.attacks.giml import Giml, MetaLearner, draw_samples, read_memory
from fedsim.audit.replay import attack_offline
from fedsim.audit.stages import audit
from fedsim.campaign.jobs import Handout, LessonJob, teach, traffic_of
from fedsim.campaign.plan import (
    after_lessons,
    jobs_of,
    lessons_of,
    observed_rounds,
    prepare,
    victims,
)
from fedsim.campaign.pools import InlinePool
from fedsim.campaign.progress import Silent
from fedsim.core.attack import Learner, Reconstruction, no_progress
from fedsim.core.errors import AttackError, NotGranted, ObservationError, SpecError
from fedsim.core.knowledge import Secrets, Traffic, View
from fedsim.core.run import Run
from fedsim.core.spec import Component, GeneratorSpec, Spec, load_spec

TINY = "options: {latent_size: 4, width: 4}, task_steps: 3, shared_steps: 2, tasks: 2"
GIML = f"{{name: giml, {TINY}, meta_steps: 2, snapshot: 1, steps: 4, seeds: 1}}"


def spec_of(*overrides: str) -> Spec:
    small = [
        "data={image_size: 16, clients: 3}",
        "model={name: convnet, options: {channels: [4, 6]}}",
        "train={rounds: 3, clients_per_round: 2, batch_size: 2, evaluate: false}",
        "threat=C",
        f"attacks=[{GIML}]",
        "audit={rounds: [3]}",
        "engine={kind: inline, device: cpu}",
    ]
    return load_spec({}, [*small, *overrides])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(spec_of(), tmp_path_factory.mktemp("giml") / "run")


def traffic(run: Run, until: int = 3) -> Traffic:
    return traffic_of(run.observations, Handout(run.spec.threat, 0, "cpu"), until, seed=5)


def memory_of(run: Run) -> Path:
    (memory,) = run.learned.iterdir()
    return memory


def test_an_audit_learns_after_every_round_and_attacks_at_the_end(run: Run) -> None:
    memory = memory_of(run)
    lessons = [json.loads(p.read_text()) for p in sorted(memory.glob("lesson-*.json"))]
    assert [lesson["steps"] for lesson in lessons] == [2, 4, 6]
    assert "on 2 observations" in lessons[0]["notes"][0]
    assert "on 6 observations" in lessons[2]["notes"][0]
    assert lessons[0]["ledger"][0] == "traffic"
    assert set(run.scores.attack) == {"giml", "prior_only"}
    assert set(run.scores["round"]) == {3}
    verdict = next(v for v in run.summary["verdicts"] if v["attack"] == "giml")
    assert "traffic" in verdict["ledger"]
    assert (memory / "samples.png").is_file()


@pytest.mark.parametrize("file", ["lesson-0002.json", "state.safetensors"])
def test_a_damaged_memory_is_learned_again(file: str, run: Run, tmp_path: Path) -> None:
    again = Run(shutil.copytree(run.root, tmp_path / "run"))
    shutil.rmtree(again.reconstructions / "giml")
    damaged = memory_of(again) / file
    damaged.write_bytes(damaged.read_bytes()[:40])
    audit(again.spec, again.root)
    same = ["attack", "client", "psnr", "ssim", "loss"]
    pd.testing.assert_frame_equal(again.scores[same], run.scores[same])
    (told,) = [e["message"] for e in again.events() if e["kind"] == "mended"]
    assert "is learned again" in told


def test_searching_what_was_learned_counts_as_reading_the_traffic(run: Run) -> None:
    (first, *_) = sorted((run.reconstructions / "giml").rglob("*.safetensors"))
    assert "traffic" in Reconstruction.load(first).ledger


def test_every_round_is_observed_though_only_the_last_is_attacked(run: Run) -> None:
    assert observed_rounds(run.spec) == [1, 2, 3]
    assert {p.name for p in run.observations.iterdir()} == {f"round-000{n}" for n in (1, 2, 3)}
    assert observed_rounds(spec_of("attacks=[{name: idlg}]")) == [3]


def test_what_it_learned_is_a_generator_file(run: Run) -> None:
    first, last = (
        load_generator(GeneratorSpec(checkpoint=str(memory_of(run) / name)), image_size=16)
        for name in ("step-00000.safetensors", "step-00006.safetensors")
    )
    z = torch.randn(2, 4)
    assert not torch.equal(generate(first, z), generate(last, z))


def test_learning_lowers_the_matching_loss(run: Run, tmp_path: Path) -> None:
    attack = Giml(
        options={"latent_size": 8, "width": 8}, tasks=6, meta_steps=6, task_steps=6, tv=0.0
    )
    lesson = attack.learn(
        traffic(run), 1, tmp_path, seed=0, device=torch.device("cpu"), progress=no_progress
    )
    losses = [loss for _, loss, _ in lesson.losses]
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])


def test_one_meta_step_by_hand(run: Run, tmp_path: Path) -> None:
    """beta of the way from w to w', as Reptile has it."""

    def weights_after(beta: float, folder: str) -> list[torch.Tensor]:
        attack = Giml(
            options={"latent_size": 4, "width": 4}, tasks=2, task_steps=2, shared_steps=2, beta=beta
        )
        state = MetaLearner(attack, traffic(run), tmp_path / folder, 3, torch.device("cpu"))
        before = [w.detach().clone() for w in state.weights]
        state.meta_step()
        return [w.detach() - b for w, b in zip(state.weights, before, strict=True)]

    half, whole = weights_after(0.5, "half"), weights_after(1.0, "whole")
    assert any(float(move.abs().max()) > 0 for move in whole)
    for small, large in zip(half, whole, strict=True):
        assert torch.allclose(small, 0.5 * large, atol=1e-6)


@pytest.mark.parametrize("outer", ["reptile", "adam"])
def test_a_lesson_that_was_cut_goes_on_after_its_last_meta_step(
    run: Run, tmp_path: Path, outer: str
) -> None:
    attack = Giml(
        options={"latent_size": 4, "width": 4},
        tasks=2,
        task_steps=2,
        shared_steps=2,
        meta_steps=4,
        snapshot=1,
        outer=outer,
    )
    device = torch.device("cpu")
    attack.learn(traffic(run), 1, tmp_path / "whole", seed=1, device=device, progress=no_progress)
    done: list[int] = []

    def cut(step: int, total: int, loss: float | None = None) -> None:
        done.append(step)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attack.learn(traffic(run), 1, tmp_path / "cut", seed=1, device=device, progress=cut)
    attack.learn(traffic(run), 1, tmp_path / "cut", seed=1, device=device, progress=cut)
    assert done == [1, 2, 3, 4]  # no meta-step was done twice
    for step in range(5):
        name = f"step-{step:05d}.safetensors"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_attacks_that_learn_alike_share_one_memory() -> None:
    one = create_attack("giml", meta_steps=3)
    assert isinstance(one, Learner)
    assert one.learner == Giml(meta_steps=3, after=2, steps=7).learner
    assert one.learner != Giml(meta_steps=4).learner
    assert one.learner != Giml(meta_steps=3, tv=0.5).learner


def test_an_attack_waits_for_the_lessons_it_needs(run: Run) -> None:
    before, middle = (
        f"{GIML[:-1]}, after: {n}, title: {t}}}" for n, t in ((0, "before"), (3, "m"))
    )
    spec = spec_of(f"attacks=[{GIML}, {before}, {middle}]")
    jobs = [
        after_lessons(job, run.learned.absolute(), observed_rounds(spec))
        for job in jobs_of(run, spec, victims(spec))
    ]
    needed = {job.label: job.requires.name for job in jobs if job.requires is not None}
    assert needed == {
        "giml": "lesson-0003.json",
        "before": "lesson-0001.json",
        "m": "lesson-0002.json",
    }
    lessons = lessons_of(run, spec, [1, 2, 3])
    assert [lesson.requires and lesson.requires.name for lesson in lessons] == [
        None,
        "lesson-0001.json",
        "lesson-0002.json",
    ]


def test_more_meta_steps_than_the_rounds_allow_are_refused() -> None:
    with pytest.raises(AttackError, match="takes 6 meta-steps in 3 rounds; after: 9"):
        prepare(spec_of(f"attacks=[{GIML[:-1]}, after: 9}}]"))


def test_one_observation_is_refused() -> None:
    alone = "train={rounds: 1, clients_per_round: 1, batch_size: 2, evaluate: false}"
    with pytest.raises(SpecError, match="learns across observations and would see one"):
        prepare(spec_of(alone, "audit={}"))


def test_one_observation_is_a_task_and_none_is_no_lesson(run: Run, tmp_path: Path) -> None:
    all_ = traffic(run)
    attack = Giml(options={"latent_size": 4, "width": 4}, meta_steps=1, task_steps=1)
    device = torch.device("cpu")
    for addresses, steps in ((all_.addresses[:1], 1), ((), 0)):
        lesson = attack.learn(
            Traffic(addresses, all_.open),
            1,
            tmp_path / str(steps),
            seed=0,
            device=device,
            progress=no_progress,
        )
        assert lesson.steps == steps


def test_an_observation_that_cannot_be_used_is_passed_over_and_told(
    run: Run, tmp_path: Path
) -> None:
    all_ = traffic(run)

    def open_(round_: int, client: int) -> View:
        if (round_, client) == all_.addresses[0]:
            raise ObservationError("the observation is damaged.")
        return all_.open(round_, client)

    attack = Giml(
        options={"latent_size": 4, "width": 4}, meta_steps=1, task_steps=1, tasks=len(all_)
    )
    lesson = attack.learn(
        Traffic(all_.addresses, open_),
        1,
        tmp_path,
        seed=0,
        device=torch.device("cpu"),
        progress=no_progress,
    )
    assert lesson.steps == 1
    assert "passed over: the observation is damaged" in lesson.notes[0]


class Hopeless(Giml):
    """A learner whose lessons all decline."""

    def learn(self, *args, **kwargs):
        raise AttackError("nothing can be learned.")


def test_a_failed_lesson_fails_the_attacks_that_wait_for_it(tmp_path: Path) -> None:
    run = audit(spec_of("attacks=[{name: 'tests.attacks.test_giml:Hopeless'}]"), tmp_path / "run")
    failed = run.summary["failed_jobs"]
    assert len(failed) == 2
    for job in failed:
        assert job["kind"] == "declined"
        assert "lesson 3 of Hopeless failed: lesson 2 of Hopeless failed: lesson 1" in job["reason"]
        assert job["reason"].endswith("nothing can be learned.")
    assert (run.root / "report.html").is_file()


class Watching(Silent):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.queued_jobs: list[str] = []
        self.finished_jobs: list[str] = []

    def queued(self, job) -> None:
        self.queued_jobs.append(job.name)

    def finished(self, job, failure) -> None:
        self.finished_jobs.append(job.name)


def test_what_comes_after_a_failure_fails_at_once_and_only_once(run: Run, tmp_path: Path) -> None:
    watch = Watching()
    pool = InlinePool(run.spec, Handout(run.spec.threat, 0, "cpu"), watch, lambda job: Secrets())
    hopeless = Component(name="tests.attacks.test_giml:Hopeless")
    first = LessonJob(run.observations, tmp_path, hopeless, "h", 1, 1)
    second = LessonJob(run.observations, tmp_path, hopeless, "h", 2, 2, first.result)
    third = LessonJob(run.observations, tmp_path, hopeless, "h", 3, 3, second.result)
    pool.submit(first)
    pool.drain()
    pool.submit(third)  # in any order
    pool.submit(second)
    pool.drain()
    assert sorted(watch.finished_jobs) == sorted(watch.queued_jobs)
    reason = json.loads(third.failure.read_text())
    assert reason["kind"] == "declined"
    assert "nothing can be learned" in reason["reason"]
    orphan = LessonJob(run.observations, tmp_path, hopeless, "h", 9, 3, tmp_path / "never.json")
    pool.submit(orphan)
    pool.drain()
    assert "never came" in json.loads(orphan.failure.read_text())["reason"]


def test_mistakes_of_a_generator_are_found_before_any_round() -> None:
    for params, words in (
        ("architecture: dcgam", "did you mean 'dcgan'"),
        ("options: {width: -3}", "cannot be built|does not take"),
        ("after: 3, meta_steps: 2, snapshot: 2", "keeps no generator after 3"),
    ):
        with pytest.raises(AttackError, match=words):
            prepare(spec_of(f"attacks=[{{name: giml, {params}}}]"))
    with pytest.raises(AttackError, match="power of two"):
        prepare(spec_of("data={image_size: 20, clients: 3}"))
    with pytest.raises(SpecError, match="say where it is"):
        prepare(spec_of("threat=D", "attacks=[{name: gias}]"))
    with pytest.raises(AttackError, match="labels: joint belongs to pixels"):
        Giml(labels="joint").task(None, torch.device("cpu"))


def test_resuming_gives_the_same_numbers(run: Run, tmp_path: Path) -> None:
    again = audit(spec_of(), tmp_path / "run")
    memory = memory_of(again)
    for path in [
        *memory.glob("lesson-000[23].json"),
        *again.reconstructions.rglob("*.safetensors"),
    ]:
        path.unlink()
    resumed = audit(spec_of(), tmp_path / "run")
    columns = ["round", "client", "attack", "image", "psnr", "loss"]
    assert resumed.scores[columns].equals(run.scores[columns])


def test_offline_it_learns_from_what_was_captured(run: Run, tmp_path: Path) -> None:
    component = run.spec.attacks[0]
    rows = attack_offline(run.observations / "round-0003", component, tmp_path, None, 1)
    assert [row["failure"] for row in rows] == [None, None]
    assert rows[0]["psnr"]


def test_samples_over_meta_steps_are_one_picture(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    held = read_memory(memory_of(run))
    assert held is not None
    assert held["samples"].shape == (7, 8, 3, 16, 16)
    draw_samples(held["samples"], tmp_path / "s.png", rows=4)
    with Image.open(tmp_path / "s.png") as picture:
        assert picture.size == (8 * 16, 4 * 16)
    assert read_memory(tmp_path) is None


def test_the_report_shows_what_was_learned(run: Run) -> None:
    page = (run.root / "report.html").read_text()
    assert "learned from gradients alone" in page


def ancestors(process: Path) -> list[int]:
    """The processes that a process of /proc descends from."""
    lines = (process / "status").read_text().splitlines()
    parent = int(next(line for line in lines if line.startswith("PPid:")).split()[1])
    return [parent, *ancestors(process.parent / str(parent))] if parent > 1 else []


@pytest.mark.slow
def test_a_killed_worker_loses_at_most_its_meta_step(tmp_path: Path) -> None:
    long = GIML.replace("task_steps: 3", "task_steps: 40")
    spec = spec_of(f"attacks=[{long}]", "engine={kind: ray, device: cpu, cpus: 2}")
    undisturbed = audit(spec, tmp_path / "calm")
    killed: list[int] = []

    def kill() -> None:
        state = tmp_path / "run" / "learned"
        while not list(state.rglob("step-00003.safetensors")):
            time.sleep(0.02)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                working = (process / "cmdline").read_bytes().startswith(b"ray::SealedWorker")
                ours = os.getpid() in ancestors(process)
            except (OSError, StopIteration):  # it ended meanwhile
                continue
            if working and ours:
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(int(process.name))

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    disturbed = audit(spec, tmp_path / "run")
    thread.join(5)
    assert killed
    columns = ["round", "client", "attack", "image", "psnr", "loss"]
    assert disturbed.scores[columns].equals(undisturbed.scores[columns])


def test_lessons_read_only_what_is_granted(run: Run, tmp_path: Path) -> None:
    job = LessonJob(run.observations, tmp_path / "m", run.spec.attacks[0], "giml", 1, 1)
    weak = run.spec.threat.model_copy(update={"model": "A"})
    with pytest.raises(NotGranted, match="does not grant"):
        teach(job, Handout(weak, 0, "cpu"))
    alone = run.spec.threat.model_copy(update={"withhold": ["traffic"]})
    with pytest.raises(NotGranted, match="needs the traffic"):
        teach(job, Handout(alone, 0, "cpu"))
    with pytest.raises(NotGranted, match="needs traffic"):
        prepare(spec_of("threat={model: C, withhold: [traffic]}"))


def test_offline_lessons_are_given_afresh(run: Run, tmp_path: Path) -> None:
    component = run.spec.attacks[0]
    where = run.observations / "round-0003"
    attack_offline(where, component, tmp_path, "C", 1)
    (memory,) = (tmp_path / "learned").iterdir()
    (memory / "stale").touch()
    attack_offline(where, component, tmp_path, "B", 1)
    assert not (memory / "stale").exists()


def test_the_preset_learns_by_the_steps_of_the_authors_scripts() -> None:
    """Their meta-training: latents for 1,000 steps at .03, shared weights for 500 at .001."""
    attack = create_attack("giml", preset="paper")
    assert (attack.task_steps, attack.task_lr) == (1000, 0.03)
    assert (attack.shared_steps, attack.shared_lr) == (500, 1e-3)
    assert (attack.latent, attack.tv, attack.lr_z, attack.lr_w) == (1e-3, 1e-4, 0.03, 1e-3)
    assert attack.learner != create_attack("giml").learner
