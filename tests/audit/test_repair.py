"""Repair: what it throws away, from where a round is done again, and what it tells."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedsim.audit.stages import audit, conclude
from fedsim.core.errors import RunError
from fedsim.core.files import save_tensors
from fedsim.core.observation import read_weights
from fedsim.core.run import Run, weights_path
from fedsim.core.vault import Vault
from fedsim.federation.checkpoint import read_checkpoint
from tests.conftest import small_spec
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
