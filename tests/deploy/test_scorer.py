"""The scorer: the run and the truth together in a third directory, and nothing on the way back."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from fedsim.audit.stages import attack_captured, audit, conclude
from fedsim.cli import app
from fedsim.core.errors import MissingKeyError, RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.keyring import VARIABLE, key_folders
from fedsim.core.run import Run, truth_path
from fedsim.core.vault import Vault
from fedsim.deploy.scorer import gather
from tests.conftest import small_spec
from tests.deploy.conftest import deployed_copy, snapshot
from tests.staging import short_report

SCORES = ["round", "client", "attack", "image", "mse", "psnr", "ssim", "label_true", "canary"]


@pytest.fixture(autouse=True)
def _quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is one more file, and most of the time; its own tests read it."""
    monkeypatch.setattr("fedsim.report.write_report", short_report)


def score(run: Run, vaults: list[Path], output: Path) -> None:
    words = ["score", str(run.root), *(f"--vault={vault}" for vault in vaults), "-o", str(output)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_a_run_is_scored_apart_and_nothing_of_the_truth_is_left_with_the_server(
    small_run: Run, tmp_path: Path
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    with pytest.raises(RunError, match="gather their vaults"):
        conclude(run)
    before, kept = snapshot(run.root), [snapshot(vault) for vault in vaults]
    score(run, vaults, tmp_path / "scored")
    assert snapshot(run.root) == before
    assert [snapshot(vault) for vault in vaults] == kept
    scored = Run.open(tmp_path / "scored")
    assert stat.S_IMODE(scored.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(scored.vault.stat().st_mode) == 0o700
    pd.testing.assert_frame_equal(scored.scores[SCORES], small_run.scores[SCORES])
    assert scored.report.is_file()
    with pytest.raises(RunError, match="gather their vaults"):
        conclude(run)


def test_a_lock_that_leads_elsewhere_stops_a_score_and_what_it_leads_to_is_left(
    small_run: Run, tmp_path: Path
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    (tmp_path / "precious.txt").write_text("years of work")
    (run.root / "run.lock").unlink(missing_ok=True)
    (run.root / "run.lock").symlink_to(tmp_path / "precious.txt")
    with pytest.raises(RunError, match="is a link, which no lock is"):
        gather(run, vaults, tmp_path / "scored")
    assert (tmp_path / "precious.txt").read_text() == "years of work"


def test_submissions_are_kept_by_the_scorer_and_never_taken_from_the_server(
    small_run: Run, tmp_path: Path
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    scored = gather(run, vaults, tmp_path / "scored")
    for root, name in ((scored.root, "mine.json"), (run.root, "forged.json")):
        (root / "submissions").mkdir()
        (root / "submissions" / name).write_text("{}")
    gather(run, vaults, tmp_path / "scored")
    assert [path.name for path in scored.submissions.iterdir()] == ["mine.json"]


def test_later_commands_take_the_scored_directory(small_run: Run, tmp_path: Path) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    score(run, vaults, tmp_path / "scored")
    for vault in vaults:
        shutil.rmtree(vault)  # the clients have theirs back
    scored = Run.open(tmp_path / "scored")
    scored.report.unlink()
    result = CliRunner().invoke(app, ["report", str(scored.root)])
    assert result.exit_code == 0, result.output
    pd.testing.assert_frame_equal(scored.scores[SCORES], small_run.scores[SCORES])
    assert scored.report.is_file()
    audit(scored.spec, scored.root)
    pd.testing.assert_frame_equal(scored.scores[SCORES], small_run.scores[SCORES])


def test_scored_again_everything_is_taken_anew(small_run: Run, tmp_path: Path) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    scored = gather(run, vaults, tmp_path / "scored")
    conclude(scored)
    before = snapshot(run.root)
    shutil.rmtree(run.reconstructions)
    attack_captured(run.root)
    assert not run.vault.exists()
    assert not (run.root / "report.html").exists()
    write_json(scored.canaries, dict.fromkeys(read_json(scored.canaries), 0.0))
    one, two = (truth_path(scored.vault, 1, client) for client in run.spec.cohort(1))
    shutil.copy(one, two)  # as somebody mixed them up
    again = gather(run, vaults, tmp_path / "scored")
    assert not again.canaries.exists()
    conclude(again)
    pd.testing.assert_frame_equal(again.scores[SCORES], small_run.scores[SCORES])
    assert snapshot(run.root).keys() == before.keys()


def test_the_truth_lies_under_a_key_of_the_scorers_own(small_run: Run, tmp_path: Path) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    scored = gather(run, vaults, tmp_path / "scored")
    names = {Vault(vault).keys.own().name for vault in (*vaults, scored.vault)}
    assert len(names) == 2
    where = (1, run.spec.cohort(1)[0])
    truth, expected = Vault(scored.vault).read(*where), Vault(small_run.vault).read(*where)
    assert torch.equal(truth.images, expected.images)
    content = truth_path(scored.vault, *where).read_bytes()
    assert expected.images.numpy().tobytes()[:16] not in content


def test_a_key_that_lies_beside_a_clients_vault_is_enough_and_one_that_is_nowhere_is_named(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    name = f"{Vault(small_run.vault).keys.own().name}.key"
    made = next(folder / name for folder in key_folders() if (folder / name).is_file())
    monkeypatch.setenv(VARIABLE, str(tmp_path / "scorers"))
    with pytest.raises(MissingKeyError, match=f"bring '{name}'"):
        gather(run, vaults, tmp_path / "scored")
    assert not (tmp_path / "scored").exists()
    for vault in vaults:
        (vault.parent / "vault-keys").mkdir()
        shutil.copy(made, vault.parent / "vault-keys")
    conclude(scored := gather(run, vaults, tmp_path / "scored"))
    pd.testing.assert_frame_equal(scored.scores[SCORES], small_run.scores[SCORES])
    assert [file.name for file in (tmp_path / "scorers").iterdir()] != [name]


def test_a_damaged_truth_costs_its_own_victim(small_run: Run, tmp_path: Path) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    damaged = next(vaults[0].rglob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    scored = gather(run, vaults, tmp_path / "scored")
    conclude(scored)
    lost = len(small_run.scores) - len(scored.scores)
    assert 0 < lost < len(small_run.scores)
    assert {event["kind"] for event in scored.events()} == {"canary_failed", "not_scored"}
    assert not run.events()


def test_vaults_that_are_none_or_say_the_same_are_refused(small_run: Run, tmp_path: Path) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    with pytest.raises(RunError, match="is no vault"):
        gather(run, [tmp_path / "nowhere"], tmp_path / "scored")
    again = shutil.copytree(vaults[0], tmp_path / "again")
    with pytest.raises(RunError, match="both the truth of the same client"):
        gather(run, [vaults[0], again], tmp_path / "scored")
    assert not (tmp_path / "scored").exists()


def test_a_directory_of_the_servers_or_of_something_else_is_refused(
    small_run: Run, tmp_path: Path
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    before = snapshot(tmp_path)
    (tmp_path / "link").symlink_to(run.root)
    for output in (run.root, run.root / "scored", tmp_path / "server", tmp_path / "link" / "x"):
        with pytest.raises(RunError, match="where the server's side reads"):
            gather(run, vaults, output)
    for output in (small_run.root, tmp_path / "0", run.spec_path):
        with pytest.raises(RunError, match=r"where the server's side reads|holds something else"):
            gather(run, vaults, output)
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before
    scored = gather(run, vaults, tmp_path / "scored")
    with pytest.raises(RunError, match=r"was scored already, from .*server/run"):
        gather(scored, vaults, tmp_path / "more")


def test_what_the_scorer_writes_does_not_reach_the_servers_files(
    small_run: Run, tmp_path: Path
) -> None:
    """Files have a second name there; whoever writes replaces, and both keep what they had."""
    run, vaults = deployed_copy(small_run, tmp_path)
    scored = gather(run, vaults, tmp_path / "scored")
    ours = next(scored.observations.rglob("client-*.json"))
    theirs = run.observations / ours.relative_to(scored.observations)
    assert ours.stat().st_ino == theirs.stat().st_ino
    before = theirs.read_bytes()
    write_json(ours, {"another": "content"})
    assert theirs.read_bytes() == before
    scored.note("test", "an event")
    assert not run.events()


def test_a_truth_that_an_older_score_left_with_the_server_is_told(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    shutil.copytree(vaults[0], run.vault)
    monkeypatch.chdir(tmp_path)
    words = ["score", str(run.root), *(f"--vault={vault}" for vault in vaults)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "the server's side reads the truth in" in result.output
    (scored,) = (tmp_path / "runs").iterdir()
    assert scored.name == f"{run.spec.name}-{run.spec.digest()}-scored"
    assert Run.open(scored).report.is_file()


def test_truths_of_other_updates_are_told_and_never_scored_as_a_miss(
    small_run: Run, tmp_path: Path
) -> None:
    run, vaults = deployed_copy(small_run, tmp_path)
    conclude(scored := gather(run, vaults, tmp_path / "scored"))
    assert scored.summary["verdicts"][0]["verdict"] == "LEAKS"
    for round_ in (1, 2):
        one, other = sorted(tmp_path.glob(f"[0-9]*/vault/round-000{round_}/*.safetensors"))
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
    conclude(scored := gather(run, vaults, tmp_path / "scored"))
    assert scored.scores.empty
    assert scored.summary["verdicts"][0]["verdict"] == "NO RESULT"
    assert "not_scored" in {event["kind"] for event in scored.events()}
    noisy = audit(small_spec("defenses=[{name: gaussian_noise, std: 0.1}]"), tmp_path / "other")
    conclude(scored := gather(run, [noisy.vault], tmp_path / "scored"))
    assert scored.scores.empty
    told = [event["message"] for event in scored.events() if event["kind"] == "foreign_truth"]
    assert "of another update than the one observed" in told[0]
