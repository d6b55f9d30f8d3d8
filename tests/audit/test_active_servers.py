"""Active servers from end to end: real rounds, chosen weights, exact pictures, honest words."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.replay import attack_offline
from fedsim.audit.stages import audit
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import SpecError
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec
from fedsim.federation.checkpoint import read_checkpoint
from tests.conftest import small_spec

QUIET = ["audit.gallery=0", "train.rounds=1"]
DISTINCT = "data.partition={kind: shard, shards_per_client: 8}"


def served(*more: str, manoeuvre: str = "fishing", letter: str = "F") -> Spec:
    named = f"server.manoeuvre={manoeuvre if manoeuvre[0] == '{' else f'{{name: {manoeuvre}}}'}"
    return small_spec(*QUIET, f"threat={letter}", named, *more)


def verdict_of(run: Run, attack: str = "patch_solve") -> dict:
    return next(entry for entry in run.summary["verdicts"] if entry["attack"] == attack)


def claimed(run: Run, attack: str = "patch_solve") -> pd.DataFrame:
    return run.scores[(run.scores["attack"] == attack) & run.scores["claimed"]]


@pytest.fixture(scope="module")
def fished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three rounds: labels are read in each, and fished for in the next."""
    spec = served("train.rounds=3", "train.batch_size=8", "server.aggregate=discard")
    return audit(spec, tmp_path_factory.mktemp("fished") / "run")


def test_fishing_takes_an_exact_picture_out_of_a_batch(fished: Run) -> None:
    entry = verdict_of(fished)
    assert entry["verdict"] == "LEAKS"
    alone = claimed(fished)
    alone = alone[alone.groupby(["round", "client"])["image"].transform("count") == 1]
    assert (alone["psnr"] > 100).all()
    assert len(alone) > 0
    assert entry["canary"]["ok"]


def test_an_honest_server_gets_nothing_out_of_the_same_batches(tmp_path: Path) -> None:
    run = audit(small_spec(*QUIET, "train.batch_size=8"), tmp_path / "run")
    assert verdict_of(run)["verdict"] != "LEAKS"


def test_what_was_captured_is_attacked_again_offline(fished: Run, tmp_path: Path) -> None:
    best = claimed(fished).sort_values("psnr").iloc[-1]
    name = f"observations/round-{best['round']:04d}/client-{best['client']:04d}.json"
    (row,) = attack_offline(fished.root / name, Component(name="row_space"), tmp_path, None, 1)
    assert row["failure"] is None
    (passive,) = attack_offline(
        fished.root / name, Component(name="patch_solve"), tmp_path / "c", "C", 1
    )
    assert passive["failure"] is None, "whoever knows nothing of the choice reads a blend"


def test_one_picture_of_a_cohort_comes_through_secure_aggregation(tmp_path: Path) -> None:
    defense = "defenses=[{name: secure_aggregation}]"
    spec = served(defense, "train.rounds=5", "train.clients_per_round=null")
    run = audit(spec, tmp_path / "run")
    found = claimed(run)
    assert float(found["psnr"].max()) > 60
    assert verdict_of(run)["verdict"] == "LEAKS"
    alone = found.groupby("round").filter(lambda rows: len(rows) == 1)
    assert (alone["psnr"] > 60).all(), "one picture among all clients, and scored once"


def test_inconsistent_weights_single_one_client_out_of_a_secure_sum(tmp_path: Path) -> None:
    spec = served(
        "defenses=[{name: secure_aggregation}]",
        "train.clients_per_round=null",
        manoeuvre="{name: inconsistent, victim: 2}",
    )
    run = audit(spec, tmp_path / "run")
    found = claimed(run)
    assert set(found["client"]) == {2}
    assert float(found["psnr"].min()) > 60


def test_the_imprint_reads_whole_batches_of_one_class(tmp_path: Path) -> None:
    spec = served(
        "train.batch_size=4",
        "data.clients=2",
        "train.clients_per_round=1",
        "model.options={patch_size: 4, depth: 4, embed_dim: 96, num_heads: 3}",
        "attacks=[{name: imprint}]",
        manoeuvre="imprint",
    )
    run = audit(spec, tmp_path / "run")
    entry = verdict_of(run, "imprint")
    assert entry["verdict"] == "LEAKS"
    assert entry["canary"]["ok"]
    assert int((claimed(run, "imprint")["psnr"] > 30).sum()) >= 3


def test_guards_that_refuse_leave_the_server_with_nothing(tmp_path: Path) -> None:
    guards = "guards=[{name: weight_check, refuse: true}]"
    run = audit(served("train.batch_size=8", guards), tmp_path / "run")
    assert verdict_of(run)["verdict"] == "NO RESULT"
    assert "did not upload" in run.events()[0]["message"]
    assert "Nothing was uploaded" in run.report.read_text()


def test_guards_under_a_passive_threat_measure_false_alarms(tmp_path: Path) -> None:
    guards = "guards=[{name: d_snr}, {name: weight_check}, {name: loss_jump}, {name: same_model}]"
    run = audit(small_spec("train.batch_size=8", guards), tmp_path / "run")
    assert [row["false_alarms"] for row in run.summary["noticed"]["guards"]] == [0] * 4
    assert all(row["tampered"] == 0 for row in run.summary["noticed"]["guards"])


def words_of(run: Run) -> dict[tuple[int, int], str]:
    """What the notes of `patch_solve` say of every victim."""
    jobs = [job for job in jobs_of(run, run.spec, victims(run.spec)) if job.label == "patch_solve"]
    return {(j.round, j.client): " ".join(Reconstruction.load(j.result).notes) for j in jobs}


def test_a_clipped_upload_still_holds_the_picture_that_was_left_in_it(tmp_path: Path) -> None:
    defense = "defenses=[{name: clipping, norm: 1.0}]"
    more = ("train.batch_size=4", "train.rounds=3", "train.clients_per_round=null")
    run = audit(served(defense, *more), tmp_path / "run")
    assert verdict_of(run)["verdict"] == "LEAKS"


@pytest.mark.parametrize(
    "defense",
    ["gaussian_noise, std: 0.2", "top_k, sparsity: 0.9", "random_k, sparsity: 0.5, rescale: true"],
)
def test_what_noise_and_sparsity_leave_of_a_count_is_no_crash_and_no_claim(
    defense: str, tmp_path: Path
) -> None:
    more = ("train.batch_size=4", "train.rounds=2")
    run = audit(served(f"defenses=[{{name: {defense}}}]", *more), tmp_path / "run")
    assert not run.summary["failed_jobs"]
    rows = run.scores[run.scores["attack"] == "patch_solve"]
    for at, words in words_of(run).items():
        if found := re.search(r"one picture of class (\d+) answered", words):
            own = rows[(rows["round"] == at[0]) & (rows["client"] == at[1])]
            assert int((own["label_true"] == int(found[1])).sum()) == 1


def test_a_gate_before_an_absent_class_claims_no_more_than_there_is(tmp_path: Path) -> None:
    run = audit(served("train.batch_size=2", "train.rounds=4"), tmp_path / "run")
    assert not run.summary["failed_jobs"]


def test_where_nothing_is_left_an_offline_attack_says_so(tmp_path: Path) -> None:
    spec = served("train.batch_size=2", manoeuvre="{name: inconsistent, victim: 0}")
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"clients_per_round": 4})})
    run = audit(spec, tmp_path / "run")
    rows = attack_offline(run.root, Component(name="patch_solve"), tmp_path / "out", None, 1)
    assert [row["unscored"] is None for row in rows] == [True, False, False, False]
    assert rows[1]["unscored"].startswith("silenced: its head was zero")
    assert all(row["failure"] is None for row in rows)


def test_a_sum_is_scored_offline_by_the_threat_that_was_asked_for(tmp_path: Path) -> None:
    defense = "defenses=[{name: secure_aggregation}]"
    run = audit(small_spec(*QUIET, defense, "threat=B"), tmp_path / "run")
    rows = attack_offline(run.root, Component(name="patch_solve"), tmp_path / "out", "C", 1)
    assert all(row["unscored"] is None and row["psnr"] for row in rows)


def test_the_victims_imprint_is_read_by_its_own_attack(tmp_path: Path) -> None:
    spec = served(
        "train.clients_per_round=null",
        "attacks=[{name: imprint}]",
        "model.options={patch_size: 4, depth: 4, embed_dim: 96, num_heads: 3}",
        manoeuvre="{name: inconsistent, victim: 1, lure: {name: imprint}}",
    )
    run = audit(spec, tmp_path / "run")
    found = claimed(run, "imprint")
    assert set(found["client"]) == {1}
    assert float(found["psnr"].min()) > 25


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["{name: inconsistent, victim: 9}"], "client 9 is asked in no round"),
        (["{name: fishing, threshold: surrogate}"], "needs pictures of the server's own"),
        (["{name: fishing, target: 99}"], "the classes are 0 to 7"),
        (["imprint", "model.options={patch_size: 5, depth: 3}"], "do not fill a side of 32"),
        (["imprint", "model={name: resnet10t}"], "needs a Vision Transformer"),
    ],
)
def test_a_manoeuvre_that_cannot_work_is_refused_before_a_round(
    more: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=words):
        audit(served(*more[1:], manoeuvre=more[0]), tmp_path / "run")
    assert not (tmp_path / "run" / "observations").exists()


def test_honest_copies_raise_no_alarm_beside_tampered_rounds(tmp_path: Path) -> None:
    guards = "guards=[{name: weight_check}, {name: loss_jump}]"
    more = ("train.rounds=4", "train.batch_size=4", "server.aggregate=honest_copy", guards)
    run = audit(served(*more), tmp_path / "run")
    weights, _ = run.summary["noticed"]["guards"]
    assert (weights["noticed"], weights["tampered"]) == (4, 4)
    assert (weights["false_alarms"], weights["honest"]) == (0, 4)


def test_a_head_that_starts_at_zero_is_no_alarm_until_it_moved(tmp_path: Path) -> None:
    guards = "guards=[{name: weight_check, refuse: true}]"
    spec = served(guards, "train.rounds=2", "server.rounds=[1]", "model.options.weight_init=jax")
    run = audit(spec, tmp_path / "run")
    assert run.rounds["clients"].tolist() == [0, 2]


def test_a_memory_counts_those_who_stayed_in_a_sum(tmp_path: Path) -> None:
    spec = served(
        "defenses=[{name: secure_aggregation}]",
        "train.clients_per_round=null",
        "guards=[{name: 'tests.servers:OneRefuses', client: 1, refuse: true}]",
        manoeuvre="{name: 'tests.servers:SameHead'}",
    )
    run = audit(spec, tmp_path / "run")
    assert read_checkpoint(run).memory["seen"] == [[1, 0, 3], [1, 2, 3], [1, 3, 3]]


@pytest.mark.slow
def test_on_ray_a_fished_run_gives_the_same_scores_and_goes_on(fished: Run, tmp_path: Path) -> None:
    spec = served("train.rounds=3", "train.batch_size=8", "engine.kind=ray")
    run = audit(spec, tmp_path / "run")
    columns = ["round", "client", "attack", "image", "psnr", "canary", "claimed"]
    pd.testing.assert_frame_equal(run.scores[columns], fished.scores[columns])
    for path in sorted(run.reconstructions.rglob("*.safetensors"))[::2]:
        path.unlink()
    run.checkpoint.unlink()
    again = audit(spec, run.root)
    pd.testing.assert_frame_equal(again.scores[columns], fished.scores[columns])


def test_whoever_a_server_is_after_must_be_scored(tmp_path: Path) -> None:
    sums = ("defenses=[{name: secure_aggregation}]", "train.clients_per_round=null")
    chosen = victims(served(*sums, "audit.victims=1", manoeuvre="{name: inconsistent}"))
    other = next(c for c in range(4) if c != chosen[0][1])
    aimed = f"{{name: inconsistent, victim: {other}}}"
    for manoeuvre in (aimed, "fishing"):
        with pytest.raises(SpecError, match=r"audit\.victims leaves out client"):
            audit(served(*sums, "audit.victims=1", manoeuvre=manoeuvre), tmp_path / "run")


def test_a_client_that_was_sent_honest_weights_counts_as_that(tmp_path: Path) -> None:
    sums = ("defenses=[{name: secure_aggregation}]", "train.clients_per_round=null")
    more = ("train.rounds=2", "guards=[{name: weight_check}]")
    run = audit(served(*sums, *more, manoeuvre="{name: inconsistent, victim: 0}"), tmp_path / "run")
    (weights,) = run.summary["noticed"]["guards"]
    cohort = len(run.spec.cohort(1))
    assert weights["tampered"] == 2 * (cohort - 1)
    assert weights["honest"] == 2  # the victim's own
    assert weights["noticed"] == cohort - 1  # a head that is zero in the second round as well
    assert weights["false_alarms"] == 0
