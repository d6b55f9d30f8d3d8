"""The envelope: the worst case of every picture, and what an attacker would have picked."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.stages import audit, conclude
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.attack import Fit, Reconstruction
from fedsim.core.run import Run
from fedsim.scoring.envelope import envelope_of, excused_tries
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


def test_a_false_proof_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reconstruction that seems to explain everything, and is grey."""
    brief(monkeypatch)
    spec = small_spec(*TINY, "attacks=standard", NOISE, "audit.gallery=0", "seed=2")
    claimed = lambda view, result, device: Fit(0.0, 0.0, complete=True)  # noqa: E731
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
