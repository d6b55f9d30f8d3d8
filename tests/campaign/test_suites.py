"""Suites in a plan: who plays under which letter, both ways, in stages, and who is spared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.campaign.jobs import SPARED
from fedsim.campaign.plan import jobs_of, labelled_attacks, roles, victims
from fedsim.campaign.suites import both_ways, cast_of, suite_of
from fedsim.core.attack import Fit, Reconstruction
from fedsim.core.errors import SpecError
from fedsim.core.files import write_json
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec, load_spec
from fedsim.scoring.scores import failures, spared
from tests.brief_suite import brief
from tests.conftest import SMALL, small_spec
from tests.planted import TINY

STANDARD = "attacks=standard"
SURE = "model.options={patch_size: 8, depth: 2, embed_dim: 96}"  # whose positions show every patch


def _named(spec: Spec) -> list[str]:
    return [label for label, _ in labelled_attacks(spec)]


def test_a_spec_remembers_the_suite_by_its_version() -> None:
    spec = small_spec(STANDARD)
    assert [component.name for component in spec.attacks] == ["standard-1"]
    assert load_spec(spec.model_dump(mode="json")) == spec
    exhaustive = small_spec("attacks=[{name: standard, exhaustive: true}]")
    assert exhaustive.attacks[0].params == {"exhaustive": True}
    assert exhaustive.digest() != spec.digest()


def test_members_stand_for_the_suite_beside_other_attacks() -> None:
    names = _named(small_spec("attacks=[{name: dlg}, {name: standard}]"))
    assert names[0] == "dlg"
    assert names[1:3] == ["patch_solve", "row_space"]
    assert names[-1] == "prior_only"
    assert set(roles(small_spec(STANDARD))) == set(_named(small_spec(STANDARD))) - {"prior_only"}


def test_a_letter_that_no_member_plays_under_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"standard-1 has no member for threat A; .* from B on"):
        labelled_attacks(small_spec(STANDARD, "threat=A"))


@pytest.mark.parametrize("title", ["standard-1", "standard-1 picked"])
def test_no_other_attack_is_called_as_a_line_of_the_suite(title: str) -> None:
    with pytest.raises(SpecError, match="another title"):
        labelled_attacks(small_spec(f"attacks=[{{name: standard}}, {{name: dlg, title: {title}}}]"))


def test_two_suites_are_refused() -> None:
    with pytest.raises(SpecError, match="two suites"):
        suite_of(small_spec("attacks=[{name: standard}, {name: standard-1}]"))


def test_a_letter_has_the_members_that_it_grants_all_they_need() -> None:
    cast = cast_of(small_spec(STANDARD))
    assert cast is not None
    assert not cast.missing
    assert "gradvit" not in _named(small_spec(STANDARD))
    owning = small_spec(STANDARD, "threat={model: D, prior: {name: efficientnet_lite0}}")
    assert "gradvit" in _named(owning)
    poor = cast_of(owning)
    assert poor is not None
    assert set(poor.missing) == {"gias", "inverter"}
    assert "threat.generator" in poor.missing["gias"]
    assert "threat.surrogate" in poor.missing["inverter"]


def test_a_suite_has_candidates_for_its_membership_inference() -> None:
    assert small_spec(STANDARD).threat.candidates == 16
    assert "membership" in _named(small_spec(STANDARD, "threat=B"))
    none = cast_of(small_spec(STANDARD, "threat={model: C, candidates: 0}"))
    assert none is not None
    assert set(none.missing) == {"membership"}
    assert small_spec().threat.candidates == 0


def test_what_is_withheld_is_missed() -> None:
    cast = cast_of(small_spec(STANDARD, "threat={model: C, withhold: [weights]}"))
    assert cast is not None
    assert not cast.parts
    assert "withhold" in cast.missing["patch_solve"]


def test_an_active_letter_fishes_unless_it_is_told_otherwise() -> None:
    def manoeuvre(*overrides: str) -> str | None:
        chosen = load_spec({}, [*SMALL, STANDARD, *overrides]).server.manoeuvre
        return chosen and chosen.name

    assert manoeuvre("threat=F") == "fishing"
    assert manoeuvre("threat={model: G}") == "fishing"
    assert manoeuvre("threat=F", "server.manoeuvre.name=imprint") == "imprint"
    assert manoeuvre("threat=C") is None


def test_an_attack_that_can_adapt_runs_both_ways_where_it_matters() -> None:
    attacks = [Component(name="patch_solve"), Component(name="row_space")]
    mjp, noise = Component(name="mjp"), Component(name="gaussian_noise")
    both = list(both_ways(attacks, [mjp]))
    assert [c.short_name for c in both] == ["patch_solve", "patch_solve naive", "row_space"]
    assert both[1].params["adaptive"] is False
    assert len(list(both_ways(attacks, [noise]))) == 2


def test_members_run_both_ways_where_the_attacker_knows_of_the_defenses() -> None:
    informed = _named(small_spec(STANDARD, "defenses=[{name: mjp}]"))
    assert "patch_solve naive" in informed
    assert "cosine tv 0.1 naive" in informed
    unaware = _named(small_spec(STANDARD, "defenses=[{name: mjp}]", "threat=B"))
    assert not [name for name in unaware if name.endswith("naive")]


def test_a_later_stage_comes_after_the_cheaper_ones_on_the_same_victim(tmp_path: Path) -> None:
    spec = small_spec(STANDARD, "audit.trials=2")
    jobs = jobs_of(Run(tmp_path), spec, victims(spec))
    assert all(job.judged for job in jobs)
    (longer,) = [job for job in jobs if job.label == "four times the steps"]
    assert (longer.round, longer.client, longer.trial) == (*min(victims(spec)), 0)
    search = next(job for job in jobs if job.label == "cosine tv 0.1" and job.trial == 1)
    before = {path.parents[1].name for path in search.after}
    assert before == {"patch_solve", "row_space", "rgap", "april_closed", "spear"}
    assert all(f"client-{search.client:04d}-trial-1" in path.name for path in search.after)
    exhaustive = small_spec("attacks=[{name: standard, exhaustive: true}]")
    assert not any(job.after for job in jobs_of(Run(tmp_path), exhaustive, victims(exhaustive)))


def test_a_victim_that_is_recovered_exactly_needs_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    spec = small_spec(*TINY, SURE, STANDARD)
    run = audit(spec, tmp_path / "run")
    suite = run.summary["suite"]
    by_name = {member["attack"]: member for member in suite["members"]}
    assert by_name["patch_solve"]["victims"] == 2
    assert by_name["cosine tv 0.1"]["spared"] == 2
    assert by_name["rgap"]["declined"]
    assert suite["verdict"] == "LEAKS"
    assert suite["evaluations"] == 0
    assert suite["envelope"]["recovered"] == suite["picked"]["recovered"] == 1
    assert suite["flags"] == []
    verdicts = {entry["attack"]: entry for entry in run.summary["verdicts"]}
    assert "was not needed" in verdicts["layers"]["words"]
    assert verdicts["layers"]["declined"], "nothing went wrong"
    assert {job["kind"] for job in run.summary["failed_jobs"]} == {"declined"}
    before = run.scores
    assert audit(spec, run.root).scores.equals(before)
    assert "standard-1" in run.report.read_text()


def test_without_the_result_that_spared_it_a_job_is_undone(tmp_path: Path) -> None:
    spec = small_spec(STANDARD)
    jobs = jobs_of(Run(tmp_path), spec, victims(spec))
    job = next(job for job in jobs if job.label == "layers")
    about = {"job": job.name, "attack": job.label, "kind": SPARED, "reason": "not needed"}
    write_json(job.failure, about)
    Reconstruction(torch.zeros(1, 3, 32, 32), fit=Fit(0.0, 0.0, complete=True)).save(job.after[0])
    assert (spared([job]), failures([job])) == ([job], [])
    job.after[0].unlink()
    assert spared([job]) == []
    assert [one["kind"] for one in failures([job])] == ["fault"]


def test_a_victim_that_is_not_recovered_meets_every_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    noise = "defenses=[{name: gaussian_noise, std: 0.3, relative: true}]"
    run = audit(small_spec(*TINY, STANDARD, noise), tmp_path / "run")
    suite, envelope, scores = run.summary["suite"], run.envelope, run.scores
    members = [m for m in suite["members"] if not m["declined"] and not m["check"]]
    assert all(member["victims"] == 2 and not member["spared"] for member in members)
    assert suite["evaluations"] == 2 * 2 * 2  # two searches of two steps, two victims
    assert (scores["attack"] == "four times the steps").sum() == 1
    assert len(envelope) == 2
    assert not set(envelope["attack"]) & {"four times the steps"}
    counted = scores[scores["attack"] != "four times the steps"]
    best = counted.groupby(["round", "client", "image"])["psnr"].max()
    assert envelope["psnr"].tolist() == best.tolist()
    assert (envelope["picked_psnr"] <= envelope["psnr"]).all()
    assert not [entry for entry in run.summary["verdicts"] if entry["verdict"] == "INCOMPLETE"]
