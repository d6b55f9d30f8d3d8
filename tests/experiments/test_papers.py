"""The papers' tables, unattended: what was begun is gone on with, what is done is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import papers
from fedsim.attacks import create_attack
from fedsim.attacks.matching import PresetParameters
from fedsim.audit.stages import audit
from fedsim.core.spec import load_spec
from tests.conftest import small_spec


def test_a_table_that_stopped_is_gone_on_with_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "HERE", tmp_path)
    table = papers.Table("small", "small.yaml", ("train.rounds=1",))
    monkeypatch.setattr(papers, "TABLES", [table])
    spec = small_spec(*table.overrides)
    (tmp_path / table.spec).write_text(spec.to_yaml())
    root = tmp_path / "tables"
    run = audit(spec, root / table.name)
    whole = papers.page(root, {})
    (run.root / "scores.csv").unlink()
    assert table.name not in papers.page(root, {})
    assert papers.run_table(table, root / table.name, ["seed=2"]) > 0
    assert papers.page(root, {}) == whole
    assert "| patch_solve |" in whole


def test_every_table_has_a_spec_and_a_name_of_its_own() -> None:
    names = [table.name for table in papers.TABLES]
    assert len(set(names)) == len(names)
    for table in papers.TABLES:
        assert (papers.HERE / table.spec).is_file()


@pytest.mark.parametrize("table", papers.TABLES, ids=lambda table: table.name)
def test_the_papers_budgets_leave_what_sets_the_rows_of_a_table_apart(table: papers.Table) -> None:
    override = papers.at_paper_budget(papers.HERE / table.spec)
    spec = load_spec(papers.HERE / table.spec, [override])
    built = [create_attack(attack.name, **attack.params) for attack in spec.attacks]
    assert len({repr(attack) for attack in built}) == len(built)
    for attack, given in zip(built, load_spec(papers.HERE / table.spec).attacks, strict=True):
        if isinstance(attack, PresetParameters):
            assert attack.preset == "paper"
            assert attack.steps >= given.params.get("steps", 0)
