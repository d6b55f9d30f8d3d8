"""Active servers from end to end: real rounds, chosen weights, exact pictures, honest words."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.replay import attack_offline
from fedsim.audit.stages import audit
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec
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
