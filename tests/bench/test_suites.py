"""Suites in a bench: two lines for all members, flags, paths of strengths."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fedsim.bench.cells import load_bench
from fedsim.bench.measurement import conduct
from fedsim.bench.report import _paths
from fedsim.bench.suites import envelope_in, suite_outcomes, suite_rows
from fedsim.bench.table import as_markdown
from fedsim.core.run import Run
from fedsim.scoring.scores import columns
from tests.brief_suite import brief
from tests.conftest import SMALL
from tests.planted import TINY

DEFENSES = "[{name: gaussian_noise, strengths: [{std: 0.3, relative: true}]}, {name: mjp}]"
PLAIN = [one for one in SMALL if not one.startswith("attacks")]


def test_a_bench_without_attacks_takes_the_standard_suite() -> None:
    bench = load_bench({}, [*PLAIN, "bench={defenses: [{name: mjp}]}"])
    assert [component.name for component in bench.spec.attacks] == ["standard-1"]


def test_quick_takes_one_seed_and_two_victims() -> None:
    section = "bench={defenses: [{name: mjp}], seeds: [3, 4]}"
    bench = load_bench({}, [*PLAIN, "audit.victims=4", section], quick=True)
    assert bench.section.seeds == [3]
    assert bench.spec.audit.victims == 2
    fewer = load_bench({}, [*PLAIN, "audit.victims=1", section], quick=True)
    assert fewer.spec.audit.victims == 1


def test_two_lines_stand_for_all_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brief(monkeypatch)
    bench = load_bench({}, [*PLAIN, *TINY, "audit.gallery=0", f"bench={{defenses: {DEFENSES}}}"])
    table = conduct(bench, tmp_path)
    assert list(dict.fromkeys(table["attack"])) == ["standard-1", "standard-1 picked"]
    assert (table["pictures"] == 2).all()
    pictures = pd.read_csv(tmp_path / "pictures.csv")
    noisy = pictures[pictures["defense"] == "gaussian_noise"]
    members = noisy[~noisy["attack"].str.startswith("standard") & noisy["member"].isna()]
    assert {"patch_solve", "layers"} <= set(members["attack"])
    counted = members[members["attack"] != "four times the steps"]
    best = counted.groupby(["round", "client", "image"])["psnr"].max()
    line = table[(table["defense"] == "gaussian_noise") & (table["attack"] == "standard-1")]
    assert line["psnr"].item() == pytest.approx(best.mean())
    assert "naive" not in as_markdown(table)
    page = (tmp_path / "report.html").read_text()
    assert "standard-1" in page


def test_a_cell_where_nothing_was_scored_has_no_rows(tmp_path: Path) -> None:
    run, suite = Run(tmp_path), {"version": "standard-1", "members": [], "flags": []}
    pd.DataFrame(columns=[*columns()]).to_csv(tmp_path / "scores.csv", index=False)
    assert suite_rows(run, suite).empty
    about = {**suite, "verdict": "NO RESULT"}
    assert [line["victims"] for line in suite_outcomes(about, [], [], envelope_in(run))] == [0, 0]


def test_a_victim_of_which_nobody_can_pick_is_not_counted() -> None:
    rows = [(1, 0, "layers"), (1, 1, None)]
    envelope = pd.DataFrame(rows, columns=["round", "client", "picked"])
    suite = {"version": "standard-1", "members": [{"attack": "layers"}], "flags": []}
    entry = {"attack": "layers", "verdict": "PARTIAL", "victims": 2, "victims_of": 2}
    lines = suite_outcomes({**suite, "verdict": "PARTIAL"}, [entry], [], envelope)
    assert [(line["victims"], line["victims_of"]) for line in lines] == [(2, 2), (1, 2)]


def test_strengths_of_a_defense_are_joined_from_no_defense_on() -> None:
    cells = [
        {"defense": "none", "accuracy": 0.5, "ssim": 1.0},
        {"defense": "noise", "accuracy": 0.4, "ssim": 0.6},
        {"defense": "noise", "accuracy": 0.3, "ssim": 0.2},
    ]
    assert _paths(cells) == [[(50.0, 1.0), (40.0, 0.6), (30.0, 0.2)]]
    assert _paths(cells[:1]) == []
