"""The envelope: the worst case of every picture, and what an attacker would have picked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedsim.audit.stages import audit, conclude
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.attack import Fit, Reconstruction
from fedsim.core.knowledge import View
from fedsim.core.observation import recorded_checksum
from fedsim.core.run import Run
from fedsim.scoring.envelope import _verdict, envelope_of, excused_tries
from tests.brief_suite import brief
from tests.conftest import small_spec
from tests.planted import TINY

NOISE = "defenses=[{name: gaussian_noise, std: 0.3, relative: true}]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A brief suite on noisy updates, of which nothing is exact."""
    with pytest.MonkeyPatch.context() as patch:
        brief(patch)
        spec = small_spec(*TINY, "attacks=standard", NOISE, "audit.gallery=0")
        return audit(spec, tmp_path_factory.mktemp("suite") / "run")


def _judged(run: Run, member: str, client: int, distance: float) -> None:
    """Let one member's reconstruction of one client be as convincing as that."""
    for job in jobs_of(run, run.spec, victims(run.spec)):
        if (job.label, job.client) == (member, client):
            result = Reconstruction.load(job.result)
            result.fit = Fit(distance, distance, complete=True)
            result.save(job.result)


def test_the_pick_follows_the_evidence_and_not_the_truth(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    jobs, scores = jobs_of(run, run.spec, victims(run.spec)), run.scores
    first, second = sorted(scores["client"].unique())
    _judged(run, "layers", first, -1.0)
    _judged(run, "patch_solve", second, -1.0)
    envelope = envelope_of(run, jobs, scores).set_index("client")
    assert envelope.loc[first, "picked"] == "layers"
    assert envelope.loc[second, "picked"] == "patch_solve"
    mine = scores[(scores["attack"] == "layers") & (scores["client"] == first)]
    assert envelope.loc[first, "picked_psnr"] == mine["psnr"].item()


def test_the_worst_case_may_be_another_members_for_every_picture(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    scores = run.scores
    first, second = sorted(scores["client"].unique())
    for client, member in ((first, "row_space"), (second, "layers")):
        chosen = (scores["client"] == client) & (scores["attack"] == member)
        scores.loc[chosen, "psnr"] = 90.0
    jobs = jobs_of(run, run.spec, victims(run.spec))
    envelope = envelope_of(run, jobs, scores).set_index("client")
    assert envelope.loc[first, "attack"] == "row_space"
    assert envelope.loc[second, "attack"] == "layers"
    assert envelope["recovered"].all()


def test_a_picture_that_came_back_elsewhere_is_worse_than_a_close_blur(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    scores = run.scores
    layers, others = scores["attack"] == "layers", scores["attack"] == "row_space"
    scores.loc[layers, ["psnr", "psnr_registered"]] = 12.0, 45.0
    scores.loc[others, "psnr"] = 25.0
    jobs = jobs_of(run, run.spec, victims(run.spec))
    envelope = envelope_of(run, jobs, scores)
    assert set(envelope["attack"]) == {"layers"}
    assert envelope["recovered"].all()


def test_grey_that_nobody_claims_is_no_worst_case(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    scores = run.scores
    grey = scores["attack"] == "features"
    assert not scores.loc[grey, "claimed"].any()
    scores.loc[grey, "psnr"] = 28.0
    envelope = envelope_of(run, jobs_of(run, run.spec, victims(run.spec)), scores)
    assert "features" not in set(envelope["attack"])


def test_an_attack_beside_the_suite_does_not_take_its_pick(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    jobs = jobs_of(run, run.spec, victims(run.spec))
    beside = [replace(job, label="mine") for job in jobs if job.label == "row_space"]
    for job in beside:
        fit = Fit(-2.0, -2.0, complete=True)
        result = Reconstruction(torch.zeros(1, 3, 32, 32), fit=fit)
        result.observation = recorded_checksum(job.observation) or ""
        result.made_by = job.digest(run.spec.seed)
        result.save(job.result)
    envelope = envelope_of(run, [*jobs, *beside], run.scores)
    assert envelope["picked"].notna().all()


@pytest.mark.parametrize(
    ("met", "verdict"),
    [
        ([("NOT RECOVERED", {}), ("NO RESULT", {"declined": True})], "NOT RECOVERED"),
        ([("NOT RECOVERED", {}), ("NO RESULT", {"declined": False})], "INCOMPLETE"),
        ([("NOT RECOVERED", {}), ("NO RESULT", {"refused": 2, "victims_of": 0})], "NOT RECOVERED"),
        ([("LEAKS", {}), ("NO RESULT", {"declined": False})], "LEAKS"),
        ([("NO RESULT", {"declined": True}), ("NO RESULT", {"declined": False})], "NO RESULT"),
        ([("NOT SCORED", {}), ("NO RESULT", {"declined": True})], "NOT SCORED"),
        ([], "NO RESULT"),
    ],
)
def test_a_member_that_crashed_keeps_the_suite_from_a_clean_verdict(
    met: list[tuple[str, dict[str, object]]], verdict: str
) -> None:
    assert _verdict([{"verdict": name, **about} for name, about in met]) == verdict


def test_the_check_of_the_budget_is_no_part_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    scores = run.scores
    scores.loc[scores["attack"] == "four times the steps", "psnr"] = 120.0
    envelope = envelope_of(run, jobs_of(run, run.spec, victims(run.spec)), scores)
    assert envelope["psnr"].max() < 120


def test_the_scores_say_which_rows_are_the_worst_case_and_the_pick(run: Run) -> None:
    scores, envelope = run.scores, run.envelope.set_index("client")
    for column, name, trial in (
        ("worst_case", "attack", "trial"),
        ("picked", "picked", "picked_trial"),
    ):
        rows = scores[scores[column]].set_index("client")
        assert len(rows) == len(envelope)
        assert (rows["attack"] == envelope[name].reindex(rows.index)).all()
        assert (rows["trial"] == envelope[trial].reindex(rows.index)).all()


def test_without_a_suite_there_is_no_envelope(small_run: Run) -> None:
    jobs = jobs_of(small_run, small_run.spec, victims(small_run.spec))
    assert envelope_of(small_run, jobs, small_run.scores).empty
    assert "suite" not in small_run.summary


def test_of_the_check_all_tries_but_one_are_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    brief(monkeypatch)
    spec = small_spec("attacks=standard", "audit.trials=2")
    excused = excused_tries(spec, [])
    assert set(excused) == {"four times the steps"}
    tries = {(*victim, trial) for victim in victims(spec) for trial in (0, 1)}
    assert tries - excused["four times the steps"] == {(*min(victims(spec)), 0)}


def test_a_check_that_was_spared_was_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    brief(monkeypatch)
    spec = small_spec("attacks=standard")
    jobs = jobs_of(Run("nowhere"), spec, victims(spec))
    check = next(job for job in jobs if job.label == "four times the steps")
    assert len(excused_tries(spec, [check])["four times the steps"]) == len(victims(spec))


def test_of_whom_guards_kept_away_nothing_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    brief(monkeypatch)
    spec = small_spec("attacks=standard")
    first, *_, last = victims(spec)
    excused = excused_tries(spec, [], {last})["four times the steps"]
    assert excused == {(*v, 0) for v in victims(spec)} - {(*first, 0), (*last, 0)}


def test_a_false_proof_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reconstruction that seems to explain everything, and is grey."""
    brief(monkeypatch)
    spec = small_spec(*TINY, "attacks=standard", NOISE, "audit.gallery=0", "seed=2")

    def claimed(view: View, result: Reconstruction, device: torch.device) -> Fit | None:
        return Fit(0.0, 0.0, complete=True) if len(result.images) else None

    monkeypatch.setattr("fedsim.campaign.jobs.fit_of", claimed)
    suite = audit(spec, tmp_path / "run").summary["suite"]
    assert "proof" in {flag["flag"] for flag in suite["flags"]}
    assert any(member["spared"] for member in suite["members"])


def test_the_summary_and_the_page_tell_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    brief(monkeypatch)
    conclude(run)
    suite = run.summary["suite"]
    assert suite["envelope"]["psnr"]["mean"] >= suite["picked"]["psnr"]["mean"]
    assert [row["client"] for row in suite["by_client"]]
    table = pd.read_csv(run.root / "envelope.csv")
    assert len(table) == suite["envelope"]["pictures"]
    page = run.report.read_text()
    assert 'id="suite"' in page
    assert suite["words"] in page
    assert page.count('<li><span><span class="label') < 8, "members are not named at the top"
    assert "check of the budget" in page
