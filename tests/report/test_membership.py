"""Membership on the page: areas, what they are beside, curves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from fedsim.report.membership import sections
from tests.attacks.test_membership import ATTACK, BATCH
from tests.conftest import small_spec


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(small_spec(*BATCH, ATTACK), tmp_path_factory.mktemp("page") / "run")


def test_the_page_tells_who_was_in_the_batch_by_what(run: Run) -> None:
    source = run.report.read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", source))
    assert "Who was in the batch" in text
    assert "score, beside others with the same labels" in text
    assert "the label alone, beside others with any labels" in text
    assert "above all others: too few for 1" in text
    assert 'aria-label="ROC curve of membership' in source
    area = next(v for v in run.summary["verdicts"] if v["attack"] == "membership")["membership"]
    assert f"{area['matched']['auc']:.3f}" in text
    assert "pictures that may be in the batch" in text  # among what the threat model grants


def test_a_lost_table_costs_the_curves_and_nothing_else(run: Run, tmp_path: Path) -> None:
    verdicts = run.summary["verdicts"]
    there, lost = sections(run, verdicts), sections(Run(tmp_path), verdicts)
    assert there[0].curves is not None
    assert lost[0].curves is None
    assert lost[0].rows == there[0].rows
    assert len(there[0].rows) == 4


def test_without_such_an_attack_there_is_no_such_section(small_run: Run) -> None:
    assert sections(small_run, small_run.summary["verdicts"]) == []
    assert "Who was in the batch" not in small_run.report.read_text(encoding="utf-8")
