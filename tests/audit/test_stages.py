"""The audit, end to end in one process: contract, honesty, resumption, bad input."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.stages import audit, federate
from fedsim.campaign.jobs import AnyJob
from fedsim.campaign.plan import prepare
from fedsim.campaign.progress import Silent
from fedsim.core.errors import DataError, ModelError, NotGranted, RunError, SpecError
from fedsim.core.files import read_json, write_json
from fedsim.core.run import Run, list_observations
from fedsim.core.vault import Vault
from fedsim.scoring.scores import columns
from tests.conftest import small_spec
from tests.faults import LOOT
from tests.staging import short_report


def numbers(run: Run) -> pd.DataFrame:
    return run.scores.drop(columns=["seconds"])


def test_an_audit_writes_what_the_contract_says(small_run: Run) -> None:
    assert list(small_run.scores.columns) == columns()
    assert pd.read_parquet(small_run.root / "scores.parquet").shape == small_run.scores.shape
    for name in ("summary.json", "report.html", "rounds.csv", "spec.yaml"):
        assert (small_run.root / name).is_file()
    verdicts = {v["attack"]: v for v in small_run.summary["verdicts"]}
    assert verdicts["patch_solve"]["verdict"] == "LEAKS"
    assert verdicts["prior_only"]["verdict"] == "BASELINE"
    assert verdicts["patch_solve"]["canary"]["ok"]
    assert "update" in verdicts["patch_solve"]["ledger"]
    assert "update" not in verdicts["prior_only"]["ledger"]


def test_the_photos_are_recovered_and_a_guess_recovers_nothing(small_run: Run) -> None:
    scores = small_run.scores
    solved, guessed = (scores[scores["attack"] == a] for a in ("patch_solve", "prior_only"))
    assert (solved["psnr"] >= 60).all()
    assert guessed["psnr"].mean() < 20
    assert (solved["label_true"] == solved["label_recovered"]).all()


def test_metrics_that_cannot_be_had_are_empty_with_a_reason(small_run: Run) -> None:
    assert "fedsim weights fetch" in small_run.summary["unavailable"]["lpips"]
    assert small_run.scores["lpips"].isna().all()
    assert small_run.scores["psnr"].notna().all()


def test_the_same_seed_gives_the_same_numbers(small_run: Run, tmp_path: Path) -> None:
    again = audit(small_spec(), tmp_path / "again")
    pd.testing.assert_frame_equal(numbers(again), numbers(small_run))
    other = audit(small_spec("seed=2"), tmp_path / "other")
    assert not numbers(other).equals(numbers(small_run))


def test_resuming_does_only_what_is_missing(small_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(small_run.root, tmp_path / "run"))
    results = sorted(run.reconstructions.rglob("*.safetensors"))
    kept = {path: path.stat().st_mtime_ns for path in results[1:]}
    results[0].unlink()
    for name in ("scores.csv", "summary.json", "report.html"):
        (run.root / name).unlink()
    audit(run.spec, run.root)
    assert results[0].is_file()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    pd.testing.assert_frame_equal(numbers(run), numbers(small_run))


def test_rounds_go_on_after_the_last_whole_one(tmp_path: Path) -> None:
    whole = federate(small_spec("train.rounds=3"), tmp_path / "whole")

    class StopError(Exception):
        pass

    from fedsim.campaign.progress import Silent

    class StopAfterOne(Silent):
        def round_done(self, row: dict) -> None:
            raise StopError

    with pytest.raises(StopError):
        federate(small_spec("train.rounds=3"), tmp_path / "cut", watch=StopAfterOne())
    cut = Run.open(tmp_path / "cut")
    assert len(cut.rounds) == 1
    federate(cut.spec, cut.root)
    columns = ["round", "train_loss", "bytes"]
    pd.testing.assert_frame_equal(cut.rounds[columns], whole.rounds[columns])
    for path in list_observations(whole.observations):
        twin = cut.observations / path.relative_to(whole.observations)
        assert path.with_suffix(".safetensors").read_bytes() == (
            twin.with_suffix(".safetensors").read_bytes()
        )


def test_a_directory_of_another_spec_is_refused(small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="another spec"):
        audit(small_spec("seed=5"), small_run.root)
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        audit(small_spec(), tmp_path)


def test_trials_differ_by_the_attackers_coin_only(tmp_path: Path) -> None:
    attack = "attacks=[{name: inverting_gradients, steps: 2}]"
    spec = small_spec(attack, "audit.trials=2", "audit.victims=1")
    scores = audit(spec, tmp_path / "run").scores
    own = scores[scores["attack"] == "inverting_gradients"]
    assert sorted(own["trial"]) == [0, 1]
    assert own["psnr"].nunique() == 2


def test_a_frozen_position_embedding_makes_patch_solve_decline(tmp_path: Path) -> None:
    spec = small_spec("defenses=[{name: frozen_pe}]")
    with pytest.raises(SpecError, match="patch_solve needs the gradient of pos_embed"):
        audit(spec, tmp_path / "run")
    run = audit(spec, tmp_path / "run", willing=True)
    verdict = run.summary["verdicts"][0]
    assert verdict["verdict"] == "NO RESULT"
    assert "pos_embed" in verdict["words"]
    assert {job["kind"] for job in run.summary["failed_jobs"]} == {"declined"}
    truth = Vault(run.vault).read(1, run.spec.cohort(1)[0])
    assert [(e["defense"], e["stage"]) for e in truth.trail] == [("FrozenPE", "model")]


def test_oracle_labels_are_knowledge_that_the_summary_declares(tmp_path: Path) -> None:
    spec = small_spec(
        "threat.oracle_labels=true",
        "attacks=[{name: inverting_gradients, steps: 2}]",
        "audit.victims=1",
    )
    run = audit(spec, tmp_path / "run")
    assert run.summary["oracle_labels"] is True
    assert "oracle_labels" in run.summary["verdicts"][0]["ledger"]


def test_surrogate_data_reaches_the_attacker_through_the_view(tmp_path: Path) -> None:
    threat = "threat={model: D, surrogate: {name: lfw_subset}}"
    run = audit(small_spec(threat, "attacks=[{name: prior_only}]"), tmp_path / "run")
    assert "surrogate" in run.summary["verdicts"][0]["ledger"]
    with pytest.raises(SpecError, match="clients' own data"):
        prepare(small_spec("threat={model: D, surrogate: {name: photos}}"))
    with pytest.raises(SpecError, match="grants no surrogate"):
        prepare(small_spec("threat={model: C, surrogate: {name: lfw_subset}}"))


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("Greedy", "oracle_labels"),
        ("Declines", "does not apply"),
        ("Crashes", "ZeroDivisionError"),
    ],
)
def test_a_bad_attack_fails_with_its_reason_while_the_others_go_on(
    tmp_path: Path, attack: str, expected: str
) -> None:
    bad = f"attacks=[{{name: 'tests.faults:{attack}'}}, {{name: patch_solve}}]"
    run = audit(small_spec(bad, "audit.victims=1"), tmp_path / "run")
    first, second, _ = run.summary["verdicts"]
    assert first["verdict"] == "NO RESULT"
    assert expected in first["words"]
    assert second["verdict"] == "LEAKS"


def test_an_attack_that_crashed_on_most_victims_is_incomplete(tmp_path: Path) -> None:
    spec = small_spec("train.rounds=1", "train.clients_per_round=4")
    spared = spec.cohort(1)[0]
    bad = f"attacks=[{{name: 'tests.faults:CrashesBut', spared: {spared}}}]"
    run = audit(small_spec("train.rounds=1", "train.clients_per_round=4", bad), tmp_path / "run")
    first, guess = run.summary["verdicts"]
    assert first["verdict"] == "INCOMPLETE"
    assert (first["victims"], first["victims_of"]) == (1, 4)
    assert "1 of 4 victims" in first["words"]
    own = run.scores.query(f"attack == 'prior_only' and client == {spared}")["psnr"].mean()
    assert first["baseline"]["psnr"] == pytest.approx(own)
    assert guess["metrics"]["psnr"]["mean"] != pytest.approx(own)
    assert "No conclusion: less was attacked than was asked for." in run.report.read_text()


def test_an_attack_that_leaves_the_choice_to_the_truth_has_no_result(tmp_path: Path) -> None:
    bad = "attacks=[{name: 'tests.faults:Hoards', pictures: 64, labels: 8}]"
    run = audit(small_spec(bad, "audit.victims=1"), tmp_path / "run")
    assert run.summary["verdicts"][0]["verdict"] == "NO RESULT"
    assert "returned 64 pictures, and at most 1 stand" in run.summary["verdicts"][0]["words"]


def test_the_baseline_may_have_a_title_and_stays_the_baseline(tmp_path: Path) -> None:
    titled = "attacks=[{name: patch_solve}, {name: prior_only, title: a guess}]"
    run = audit(small_spec(titled, "audit={victims: 1, trials: 2}"), tmp_path / "run")
    verdicts = {entry["attack"]: entry["verdict"] for entry in run.summary["verdicts"]}
    assert verdicts == {"patch_solve": "LEAKS", "a guess": "BASELINE"}
    assert run.summary["baseline"] == "a guess"
    assert run.summary["population"][0]["attack"] == "patch_solve"
    assert run.summary["population"][0]["guess"] is not None
    assert "<code>a guess</code>" in run.report.read_text()


def test_an_attack_that_goes_for_the_vault_gets_nothing(tmp_path: Path) -> None:
    vault = tmp_path / "run" / "vault"
    burglar = f"attacks=[{{name: 'tests.faults:Burglar', vault: '{vault}'}}]"
    run = audit(small_spec(burglar), tmp_path / "run")
    assert "tried to open the vault" in run.summary["verdicts"][0]["words"]


@pytest.mark.parametrize("way", ["thread", "pool", "file"])
def test_an_attack_that_has_the_vault_opened_behind_its_back_gets_nothing(
    way: str, tmp_path: Path
) -> None:
    vault = tmp_path / "run" / "vault"
    thief = f"attacks=[{{name: 'tests.faults:Thief', vault: '{vault}', way: {way}}}]"
    run = audit(small_spec(thief, "train.rounds=1", "audit.victims=1"), tmp_path / "run")
    assert run.scores.query("attack == 'Thief'")["psnr"].max() < 30
    assert run.summary["failed_jobs"] == []


WAYS = ("result", "tensor", "number", "error", "needs", "uses", "check_spec")
LEARNED_WAYS = ("learner", "lessons_before", "lesson")


class Later(Silent):
    """Shows how far a job is when it is over."""

    last: float | None = None

    def progressed(self, job: AnyJob, done: int, total: int, loss: float | None) -> None:
        self.last = loss

    def finished(self, job: AnyJob, failure: str | None) -> None:
        assert f"{self.last or 0:.2f}"


@pytest.mark.parametrize("way", [*WAYS, *LEARNED_WAYS])
def test_an_attack_that_has_the_vault_opened_before_or_after_it_ran_gets_nothing(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.report.write_report", short_report)
    LOOT.clear()
    kind = "LaterLearner" if way in LEARNED_WAYS else "Later"
    later = f"{{name: 'tests.faults:{kind}', vault: '{tmp_path / 'run' / 'vault'}', way: {way}}}"
    spec = small_spec(f"attacks=[{later}]", "train.rounds=1", "audit.gallery=0")
    run = audit(spec, tmp_path / "run", watch=Later())
    audit(spec, run.root)  # with all of the truth there from the start
    assert not LOOT
    read = next(v for v in run.summary["verdicts"] if v["attack"] == kind)["ledger"]
    assert set(read) <= {"image_size", "batch_size", "traffic"}
    own = run.scores.query(f"attack == '{kind}'")["psnr"]
    assert way == "error" or own.max() < 30


def test_an_observation_of_clients_elsewhere_cannot_be_made_again_and_costs_its_own_jobs_only(
    small_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(small_run.root, tmp_path / "run"))
    write_json(run.root / "run.json", read_json(run.root / "run.json") | {"deployed": True})
    shutil.rmtree(run.reconstructions)
    (run.root / "canaries.json").unlink()
    damaged = list_observations(run.observations)[0].with_suffix(".safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    audit(run.spec, run.root)
    assert len(run.summary["failed_jobs"]) == 2
    assert all("damaged" in job["reason"] for job in run.summary["failed_jobs"])
    assert len(run.scores) == 2 * 3


@pytest.mark.parametrize(
    ("overrides", "error", "expected"),
    [
        (["attacks=[{name: patch_slove}]"], SpecError, "did you mean 'patch_solve'"),
        (["defenses=[{name: gausian_noise}]"], SpecError, "did you mean 'gaussian_noise'"),
        (["threat=A"], NotGranted, "threat B does"),
        (["data.name=imagefolder", "data.path=/no/such/tree"], DataError, "/no/such/tree"),
        (["data.name=imagefolder"], DataError, r"data\.path"),
        (["data.name=photo"], DataError, "did you mean 'photos'"),
        (["data.clients=9999", "train.clients_per_round=1"], DataError, "9999"),
        (["train.batch_size=500"], DataError, "batch_size"),
        (["model.name=vit_tny_patch16_224"], ModelError, "did you mean"),
        (["engine.device=tpu9"], SpecError, "tpu9"),
    ],
)
def test_bad_input_is_one_sentence_before_any_round_runs(
    tmp_path: Path, overrides: list[str], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected) as caught:
        audit(small_spec(*overrides), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
