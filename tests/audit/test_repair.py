"""Repair: what it throws away, from where a round is done again, and what it tells."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.stages import attack_captured, audit, conclude
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import ForeignCheckpointError, MisplacedObservationError, RunError
from fedsim.core.files import read_json, save_tensors, write_json
from fedsim.core.observation import read_observation, read_weights
from fedsim.core.run import Run, list_observations, weights_path
from fedsim.core.vault import Vault
from fedsim.federation.checkpoint import read_checkpoint
from tests.conftest import small_spec
from tests.deploy.conftest import deployed_copy
from tests.planted import DAMAGE, TINY, assert_same, resumed


@pytest.mark.usefixtures("quick_report")
def test_what_was_mended_is_told(rich_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    DAMAGE["half"](run.observations / "round-0002" / "client-0001.safetensors")
    DAMAGE["half"](run.reconstructions / "patch_solve/round-0001/client-0000-trial-0.safetensors")
    kept = run.reconstructions / "patch_solve/round-0002/client-0001-trial-0.safetensors"
    before = kept.stat().st_mtime_ns
    resumed(run.root)
    rounds, result = (e["message"] for e in run.summary["events"] if e["kind"] == "mended")
    assert rounds.startswith("the rounds from 2 on are done again: the observation '")
    name = "reconstructions/patch_solve/round-0001/client-0000-trial-0.safetensors"
    assert result == f"'{name}' was damaged and is made again"
    assert kept.stat().st_mtime_ns == before  # the round was done alike: its result still stands


def test_a_damaged_truth_costs_its_victim_when_only_the_report_is_asked_for(
    rich_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    DAMAGE["half"](run.vault / "round-0001" / "client-0001.safetensors")
    DAMAGE["half"](run.reconstructions / "patch_solve/round-0002/client-0000-trial-0.safetensors")
    conclude(run)
    lost = rich_run.scores.query("(round == 1 and client == 1) or (round == 2 and client == 0)")
    lost = lost[(lost["round"] == 1) | (lost["attack"] == "patch_solve")]
    assert len(run.scores) == len(rich_run.scores) - len(lost) == 5
    told = [event["message"] for event in run.events() if event["kind"] == "not_scored"]
    assert len(told) == len(lost) == 3
    assert all("go on with `fedsim audit --resume`" in message for message in told)
    assert "is not scored: the vault" in run.report.read_text()


@pytest.mark.usefixtures("quick_report")
def test_weights_of_an_earlier_round_serve_where_those_of_the_round_are_lost(
    tmp_path: Path,
) -> None:
    spec = small_spec(*TINY, "train.rounds=3")
    control = audit(spec, tmp_path / "control")
    run = Run(shutil.copytree(control.root, tmp_path / "run"))
    weights_path(run.observations, 3).unlink()
    weights_path(run.observations, 2).write_bytes(b"")
    resumed(run.root)
    assert "the rounds from 1 on" in run.events()[0]["message"]
    assert_same(run, control)
    weights_path(run.observations, 3).unlink()  # those of round 2 are there again
    resumed(run.root)
    assert "the rounds from 2 on" in run.events()[-1]["message"]
    assert_same(run, control)


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(small_spec(*TINY, "train.rounds=3"), tmp_path_factory.mktemp("three") / "run")


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def forget_rounds(run: Run) -> None:
    """Have the weights say no more than those of older versions."""
    for path in run.observations.glob("*/weights.json"):
        about = read_json(path)
        write_json(path, {name: about[name] for name in ("format", "checksum")})


@pytest.mark.usefixtures("quick_report")
@pytest.mark.parametrize("older", [False, True])
def test_rounds_that_changed_places_are_done_again_from_weights_of_their_own(
    older: bool, three_rounds: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(three_rounds.root, tmp_path / "run"))
    if older:
        forget_rounds(run)
    exchange(run.observations / "round-0002", run.observations / "round-0003")
    assert_same(resumed(run.root), three_rounds)
    assert "the rounds from 1 on are done again" in run.events()[0]["message"]


@pytest.mark.usefixtures("quick_report")
def test_weights_that_changed_places_are_no_start_for_a_round(
    three_rounds: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(three_rounds.root, tmp_path / "run"))
    for name in ("weights.json", "weights.safetensors"):
        exchange(run.observations / "round-0002" / name, run.observations / "round-0003" / name)
    path = list_observations(run.observations)[-1]
    with pytest.raises(MisplacedObservationError, match="are of round 2, not of round 3"):
        read_observation(path)
    assert_same(resumed(run.root), three_rounds)
    assert "are of round 3, not of round 2" in run.events()[0]["message"]


@pytest.mark.usefixtures("quick_report")
def test_weights_of_older_versions_are_taken_where_nothing_contradicts(
    three_rounds: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(three_rounds.root, tmp_path / "run"))
    forget_rounds(run)
    assert not resumed(run.root).events()
    weights_path(run.observations, 3).unlink()
    assert_same(resumed(run.root), three_rounds)
    assert "the rounds from 2 on are done again" in run.events()[0]["message"]


@pytest.mark.usefixtures("quick_report")
def test_weights_of_another_run_are_no_start_for_a_round(three_rounds: Run, tmp_path: Path) -> None:
    other = audit(small_spec(*TINY, "train.rounds=3", "train.lr=0.5"), tmp_path / "other")
    run = Run(shutil.copytree(three_rounds.root, tmp_path / "run"))
    for name in ("weights.json", "weights.safetensors"):
        shutil.copy(other.observations / "round-0003" / name, run.observations / "round-0003")
    assert_same(resumed(run.root), three_rounds)
    assert "are not of this run" in run.events()[0]["message"]


@pytest.mark.usefixtures("quick_report")
def test_a_checkpoint_of_another_run_is_told_and_not_gone_on_from(
    three_rounds: Run, tmp_path: Path
) -> None:
    other = audit(small_spec(*TINY, "train.rounds=3", "train.lr=0.5"), tmp_path / "other")
    run = Run(shutil.copytree(three_rounds.root, tmp_path / "run"))
    shutil.copy(other.checkpoint, run.checkpoint)
    with pytest.raises(ForeignCheckpointError, match="is of a run of another spec"):
        read_checkpoint(run)
    own = ["round", "train_loss"]
    pd.testing.assert_frame_equal(run.rounds[own], three_rounds.rounds[own])
    assert_same(resumed(run.root), three_rounds)
    assert "of another spec" in run.events()[0]["message"]
    assert "all rounds are done again" in run.events()[0]["message"]
    elsewhere, _ = deployed_copy(three_rounds, tmp_path / "elsewhere")
    shutil.copy(other.checkpoint, elsewhere.checkpoint)
    with pytest.raises(ForeignCheckpointError, match="put back its own"):
        attack_captured(elsewhere.root)
    assert elsewhere.checkpoint.read_bytes() == other.checkpoint.read_bytes()


@pytest.mark.usefixtures("quick_report")
def test_a_checkpoint_that_never_counted_its_rounds_is_damaged(tiny_run: Run, tmp_path) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    weights = read_weights(weights_path(run.observations, 1))
    for rows in ('[{"round": 7}]', '{"round": 1}', "none"):
        save_tensors(run.checkpoint, weights, {"rounds": rows})
        with pytest.raises(RunError, match="is damaged"):
            read_checkpoint(run)
        assert_same(resumed(run.root), tiny_run)


@pytest.mark.usefixtures("quick_report")
@pytest.mark.parametrize("how", ["nan", "huge"])
def test_an_update_that_was_left_out_is_no_damage(how: str, tiny_run: Run, tmp_path: Path) -> None:
    labels = [int(Vault(tiny_run.vault).read(1, client).labels[0]) for client in range(2)]
    assert labels[0] != labels[1]
    fault = f"{{name: 'tests.faults:OnLabel', label: {labels[0]}, how: {how}}}"
    run = audit(small_spec(*TINY, f"defenses=[{fault}]"), tmp_path / "run")
    before = run.events()
    assert [event["kind"] for event in before].count("update_rejected") == 1
    assert not list(run.reconstructions.rglob("client-0000-trial-*"))
    assert resumed(run.root).events() == before


def announce(run: Run, **other: object) -> None:
    """Have the observations announce something else, sealed as if it were so."""
    for path in list_observations(run.observations):
        write_json(path, read_json(path) | other)


@pytest.mark.usefixtures("quick_report")
def test_an_observation_that_announces_another_protocol_is_not_scored_and_made_again(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    announce(run, batch_size=64)
    conclude(run)
    assert run.scores.empty
    told = [event["message"] for event in run.events() if event["kind"] == "not_scored"]
    assert len(told) == len(tiny_run.scores)
    assert all("its batch_size is 64, not 1 as the run's spec says" in words for words in told)
    resumed(run.root)
    assert_same(run, tiny_run)
    mended = [event["message"] for event in run.events() if event["kind"] == "mended"]
    assert any(words.startswith("the rounds from 1 on are done again") for words in mended)


@pytest.mark.usefixtures("quick_report")
def test_what_was_taken_from_another_run_is_not_scored_and_made_again(
    tiny_run: Run, tmp_path: Path
) -> None:
    noise = "defenses=[{name: gaussian_noise, std: 10.0, relative: true}]"
    other = audit(small_spec(*TINY, noise), tmp_path / "other")
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    for folder in ("observations", "vault", "reconstructions"):
        shutil.rmtree(run.root / folder)
        shutil.copytree(other.root / folder, run.root / folder)
    conclude(run)
    assert run.scores.empty
    assert any("its defenses is" in event["message"] for event in run.events())
    resumed(run.root)
    assert_same(run, tiny_run)


@pytest.mark.usefixtures("quick_report")
def test_what_clients_elsewhere_sent_under_another_protocol_is_kept_and_not_attacked(
    tiny_run: Run, tmp_path: Path
) -> None:
    run, _ = deployed_copy(tiny_run, tmp_path)
    shutil.rmtree(run.reconstructions)
    announce(run, batch_size=64)
    before = {path: path.read_bytes() for path in list_observations(run.observations)}
    attack_captured(run.root)
    assert {path: path.read_bytes() for path in before} == before
    assert not list(run.reconstructions.rglob("*.safetensors"))
    (failure, *_) = run.reconstructions.rglob("*.failed.json")
    assert "its batch_size is 64, not 1" in read_json(failure)["reason"]


@pytest.mark.usefixtures("quick_report")
def test_results_that_changed_attacks_are_made_again(tiny_run: Run, tmp_path: Path) -> None:
    for taken, place in (("prior_only", "patch_solve"), ("patch_solve", "prior_only")):
        run = Run(shutil.copytree(tiny_run.root, tmp_path / place))
        shutil.rmtree(run.reconstructions / place)
        shutil.copytree(run.reconstructions / taken, run.reconstructions / place)
        assert_same(resumed(run.root), tiny_run)
        told = [event["message"] for event in run.events() if event["kind"] == "mended"]
        assert len(told) == 2
        assert all("made again, it was made by another attack" in words for words in told)


AUTHORED = """
from dataclasses import dataclass
import torch
from fedsim.core.attack import Reconstruction

@dataclass
class Mine:
    needs = frozenset({"image_size"})

    def reconstruct(self, view, *, device, progress):
        return Reconstruction(torch.full((1, 3, view.image_size, view.image_size), %s))
"""


@pytest.mark.usefixtures("quick_report")
def test_results_of_an_attack_whose_code_was_mended_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    spec = small_spec(*TINY, "attacks=[{name: 'mended_attack:Mine'}]")

    def audited(value: float) -> float:
        """As a process that imports the attack afresh."""
        (tmp_path / "mended_attack.py").write_text(AUTHORED % value)
        sys.modules.pop("mended_attack", None)
        importlib.invalidate_caches()
        run = audit(spec, tmp_path / "run")
        path = next((run.reconstructions / "Mine").rglob("*.safetensors"))
        return float(Reconstruction.load(path).images.mean())

    run = Run(tmp_path / "run")
    assert audited(0.25) == audited(0.25) == pytest.approx(0.25)
    assert not run.events()
    assert audited(0.75) == pytest.approx(0.75)
    told = [event["message"] for event in run.events()]
    assert len(told) == 2
    assert all("the attack's code is another now, the result made again" in w for w in told)
