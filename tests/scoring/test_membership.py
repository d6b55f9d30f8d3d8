"""Membership scored: verdicts, words, and attacks that know nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import RunError, SpecError
from fedsim.core.run import Run
from fedsim.scoring.membership import (
    COLUMNS,
    MARGIN,
    TABLE,
    add_membership,
    described,
    membership_of,
    table_of,
)
from tests.conftest import small_spec
from tests.staging import short_report


@dataclass(frozen=True)
class Constant:
    """Says the same of everybody."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "update", "candidates"})

    def reconstruct(self, view, *, device, progress):
        said = self.say(len(view.candidates)).double()[:, None]
        assert len(view.update.tensors)
        side = view.image_size
        return Reconstruction(torch.zeros(0, 3, side, side), membership=said)

    def say(self, count: int) -> torch.Tensor:
        return torch.zeros(count)


@dataclass(frozen=True)
class Place(Constant):
    """Goes by the place on the list."""

    def say(self, count: int) -> torch.Tensor:
        return torch.arange(count)


@dataclass(frozen=True)
class Keeper(Constant):
    """Keeps a memory, too."""

    learner: ClassVar[str] = "keeper"

    def lessons_before(self, rounds: int) -> int:
        return 1

    def learn(self, traffic, lesson, memory, *, seed, device, progress):
        raise NotImplementedError


ATTACKS = f"attacks=[{{name: '{__name__}:Constant'}}, {{name: '{__name__}:Place'}}]"
SPEC = ["data.clients=8", "train={batch_size: 8, rounds: 1, clients_per_round: 4}"]
LISTS = "threat={model: C, candidates: 8}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedsim.report.write_report", short_report)
        spec = small_spec(*SPEC, LISTS, ATTACKS)
        return audit(spec, tmp_path_factory.mktemp("scored") / "run")


def test_whoever_knows_nothing_tells_nothing(run: Run) -> None:
    entries = {v["attack"]: v for v in run.summary["verdicts"]}
    constant, place = (entries[name] for name in ("Constant", "Place"))
    for stratum in ("matched", "any"):
        assert constant["membership"][stratum]["auc"] == 0.5
        assert abs(place["membership"][stratum]["auc"] - 0.5) < 0.25  # of four lists
    assert {constant["verdict"], place["verdict"]} == {"NOT RECOVERED"}
    assert "does not tell who was in a batch" in constant["words"]
    assert "too few to resolve 1 % false positives" in constant["words"]
    assert not constant["claims"]
    assert constant["membership"]["label_only"] == {"matched": None, "any": None}


def test_the_table_has_a_row_for_each_candidate(run: Run) -> None:
    table = table_of(run)
    assert list(table.columns) == COLUMNS
    assert len(table) == 2 * 4 * 3 * 8
    assert table.groupby("stratum")["member"].mean().to_dict() == {
        "any": 0,
        "matched": 0,
        "member": 1,
    }


def test_a_result_that_speaks_of_another_list_is_not_scored(run: Run, tmp_path: Path) -> None:
    job = next(j for j in jobs_of(run, run.spec, victims(run.spec)) if j.label == "Place")
    result = Reconstruction.load(job.result)
    whole = result.membership
    assert whole is not None
    result.membership = whole[:-1]
    result.save(job.result)
    try:
        table = membership_of(run, [job])
        assert table.empty
        assert "another list" in run.events()[-1]["message"]
    finally:
        result.membership = whole
        result.save(job.result)


def test_an_attack_with_candidates_keeps_no_memory(tmp_path: Path) -> None:
    keeper = f"attacks=[{{name: '{__name__}:Keeper'}}]"
    with pytest.raises(SpecError, match="is handed candidates and keeps a memory"):
        audit(small_spec(*SPEC, LISTS, keeper), tmp_path / "run")


def test_a_table_that_is_damaged_or_lacking_is_told(tmp_path: Path) -> None:
    there = Run(tmp_path)
    with pytest.raises(RunError, match=r"has no membership\.csv"):
        table_of(there)
    (tmp_path / f"{TABLE}.csv").write_bytes(b"")
    with pytest.raises(RunError, match="damaged"):
        table_of(there)


def said(members: float, matched: float, anybody: float, victims: int = 6) -> pd.DataFrame:
    """Scores around these means, those of the label only for the third."""
    coin, rows = np.random.default_rng(0), []
    for client in range(victims):
        for at, (stratum, mean) in enumerate(
            8 * [("member", members), ("matched", matched), ("any", anybody)]
        ):
            alone = float(stratum != "any")
            about = [1, client, "told", 0, at, stratum, int(stratum == "member")]
            rows.append([*about, coin.normal(mean), alone, f"{client}.{at}"])
    return pd.DataFrame(rows, columns=COLUMNS)


def entry(verdict: str = "NOT RECOVERED") -> dict:
    return {
        **{"attack": "told", "verdict": verdict, "metrics": {}, "words": "before"},
        **{"victims": 6, "victims_of": 6},
    }


def test_matched_others_decide_and_nobody_else() -> None:
    for table, verdict in (
        (said(3, 0, 0), "PARTIAL"),
        (said(0, 0, -9), "NOT RECOVERED"),  # labels alone
        (said(0.1, 0, 0), "NOT RECOVERED"),
    ):
        verdicts = [entry()]
        add_membership(verdicts, table)
        assert verdicts[0]["verdict"] == verdict
        told = verdicts[0]["membership"]["told"]
        assert told == (verdict == "PARTIAL")
        assert told == (verdicts[0]["membership"]["matched"]["low"] > 0.5 + MARGIN)
        assert ("tells who was in" in verdicts[0]["words"]) == told
        assert "of which the labels alone give 1.000" in verdicts[0]["words"]


def test_what_decided_before_stays() -> None:
    for verdict in ("MIS-SPECIFIED", "INCOMPLETE", "BASELINE"):
        verdicts = [entry(verdict)]
        add_membership(verdicts, said(3, 0, 0))
        assert (verdicts[0]["verdict"], verdicts[0]["words"]) == (verdict, "before")
        assert verdicts[0]["membership"]["told"]


def test_labels_alone_are_worth_nothing_beside_matched_others() -> None:
    found = described(said(3, 0, -9))
    assert found["label_only"]["matched"]["auc"] == 0.5
    assert found["label_only"]["any"]["auc"] == 1.0
    assert found["matched"]["auc"] > 0.95
