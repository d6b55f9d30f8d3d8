"""The papers' tables, unattended: what was begun is gone on with, what is done is shown."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch import nn

from experiments.papers import data, kinds, running
from experiments.papers.budget import WHOLE, at_paper_budget
from experiments.papers.kinds import HERE, Script, Table
from experiments.papers.listed import TABLES
from experiments.training.cifar10 import is_saved, save
from fedsim.attacks import create_attack
from fedsim.attacks.generators import create_generator, save_generator
from fedsim.attacks.gias import Gias
from fedsim.attacks.gradvit import GradVit
from fedsim.attacks.matching import PresetParameters
from fedsim.audit.stages import audit
from fedsim.campaign.plan import labelled_attacks
from fedsim.core.attack import Attack
from fedsim.core.spec import load_spec
from fedsim.defenses.mjp import Mjp
from tests.conftest import small_spec


@pytest.mark.slow
def test_a_table_that_stopped_is_gone_on_with_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "HERE", tmp_path)
    table = Table("small", "small.yaml", ("train.rounds=1",))
    monkeypatch.setattr(running, "TABLES", [table])
    spec = small_spec(*table.overrides)
    (tmp_path / table.spec).write_text(spec.to_yaml())
    root = tmp_path / "tables"
    run = audit(spec, root / table.name)
    whole = running.page(root, {})
    (run.root / "scores.csv").unlink()
    assert table.name not in running.page(root, {})
    table.run(root, ["seed=2"], paper=False, jobs=1)
    assert running.page(root, {}) == whole
    assert "| patch_solve |" in whole


@pytest.mark.slow
def test_what_a_script_prints_as_a_table_is_kept_and_waits_for_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Script("first", ("papers", "-o", "{folder}", "--list"))
    second = Script("second", ("table", "{root}/audited"), after=("first",))
    chosen: list[Table | Script] = [second, first]
    monkeypatch.setattr(running, "TABLES", chosen)
    assert running.ready(chosen, tmp_path) == [first]
    assert running.ready([second], tmp_path) == []
    audit(small_spec("train.rounds=1"), tmp_path / "audited")
    running.run_missing(chosen, tmp_path, {"any": []}, paper=False, jobs=2)
    assert running.missing(chosen, tmp_path) == []
    page = (tmp_path / "TABLES.md").read_text()
    assert "## second (`python -m experiments.table`" in page
    assert "| patch_solve |" in page


def test_what_waits_for_a_table_that_is_not_done_is_left_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = Script("waits", ("table",), after=("never",))
    monkeypatch.setattr(running, "TABLES", [Script("never", ("table",)), waits])
    running.run_missing([waits], tmp_path, {"any": []}, paper=False, jobs=1)
    assert running.missing([waits], tmp_path) == [waits]
    assert "waits waits for never" in capsys.readouterr().out


def test_a_folder_holds_tables_of_one_budget(tmp_path: Path) -> None:
    running.keep_budget(tmp_path, "small")
    running.keep_budget(tmp_path, "small")
    with pytest.raises(SystemExit, match="at the small budget"):
        running.keep_budget(tmp_path, "papers'")


def test_a_table_with_a_job_that_crashed_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "HERE", tmp_path)
    spec = small_spec("train.rounds=1")
    (tmp_path / "small.yaml").write_text(spec.to_yaml())
    table = Table("broken", "small.yaml")
    run = audit(spec, tmp_path / "broken")
    assert table.done(tmp_path)
    assert "No differences: dlg has no result here." in Table(
        "broken", "small.yaml", against="dlg"
    ).lines(tmp_path)
    assert not Table("broken", "small.yaml", ("seed=7",)).done(tmp_path)  # of another spec
    for ends, done in ((["declined"], True), (["declined", "crashed"], False)):
        said = {"failed_jobs": [{"kind": kind} for kind in ends]}
        with monkeypatch.context() as patch:
            patch.setattr(type(run), "summary", said)
            assert table.done(tmp_path) is done
    run.summary_path.unlink()  # killed between the scores and what is made of them
    assert not table.done(tmp_path)
    assert table.begun(tmp_path)


def test_a_spec_is_known_again_wherever_its_files_lie() -> None:
    table = next(t for t in TABLES if t.name == "giml-6-beta")
    assert isinstance(table, Table)
    there, here, other = (
        load_spec(HERE / table.spec, [f"data.path={path}", f"threat.generator.checkpoint={file}"])
        for path, file in (
            ("/there/faces", "/there/cifar.safetensors"),
            ("/here/faces", "/here/cifar.safetensors"),
            ("/here/faces", "/here/faces.safetensors"),
        )
    )
    assert kinds._placeless(there) == kinds._placeless(here) != kinds._placeless(other)


def test_a_table_that_a_script_printed_by_other_words_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = subprocess.CompletedProcess([], 0, stdout="a word\n| a table |\n")
    monkeypatch.setattr(kinds.subprocess, "run", lambda *words, **options: said)
    script = Script("printed", ("joint", "--each", "4"))
    script.run(tmp_path, [], paper=False, jobs=1)
    assert script.done(tmp_path)
    assert script.lines(tmp_path) == ["| a table |"]
    assert not Script("printed", ("joint", "--each", "8")).done(tmp_path)


def test_a_generator_whose_training_was_cut_short_is_trained_on(tmp_path: Path) -> None:
    file, options = tmp_path / "faces.safetensors", {"image_size": 8, "channels": 1, "width": 2}
    assert not data.is_trained(file)
    for steps, whole in ((data.STEPS // 2, False), (data.STEPS, True)):
        save_generator(file, "dcgan", options, create_generator("dcgan", options), steps=steps)
        assert data.is_trained(file) is whole


def test_a_network_of_another_defense_is_trained_again(tmp_path: Path) -> None:
    file, about = tmp_path / "J.safetensors", {"variant": "J", "defenses": repr([Mjp()])}
    assert not is_saved(file, about)
    save(nn.Linear(2, 2), file, about)
    assert is_saved(file, about)
    assert not is_saved(file, about | {"defenses": repr([Mjp(ratio=0.2)])})


def test_data_that_was_half_made_is_made_again(tmp_path: Path) -> None:
    script, folder = tmp_path / "make.py", tmp_path / "made"
    script.write_text(
        "import sys, pathlib\n"
        "root = pathlib.Path(sys.argv[sys.argv.index('-o') + 1]); root.mkdir()\n"
        "(root / 'one').touch()\n"
        "if 'whole' not in sys.argv: sys.exit(4)\n"
    )
    with pytest.raises(subprocess.CalledProcessError):
        data.make_folder(folder, str(script))
    assert not folder.exists()
    data.make_folder(folder, str(script), "whole")
    assert (folder / "one").is_file()


def test_a_script_that_fails_is_named_and_its_table_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script("broken", ("table", "{root}/nothing-there"))
    running.run_missing([script], tmp_path, {"any": []}, paper=False, jobs=1)
    assert running.missing([script], tmp_path) == [script]
    assert "broken ended with 1" in capsys.readouterr().out


def test_every_table_has_a_spec_or_a_script_and_a_name_of_its_own() -> None:
    names = [table.name for table in TABLES]
    assert len(set(names)) == len(names)
    for table in TABLES:
        if isinstance(table, Table):
            assert (HERE / table.spec).is_file()
        else:
            assert (HERE / f"{table.words[0]}.py").is_file()
        assert set(table.after) <= set(names)


AUDITS = [table for table in TABLES if isinstance(table, Table)]


@pytest.mark.parametrize("table", AUDITS, ids=lambda table: table.name)
def test_the_overrides_of_a_table_fit_its_spec(table: Table) -> None:
    overrides = [word.replace("{root}", "ROOT") for word in table.overrides]
    spec = load_spec(HERE / table.spec, overrides)
    labels = [label for label, _ in labelled_attacks(spec)]
    assert table.against in labels


@pytest.mark.parametrize("table", AUDITS, ids=lambda table: table.name)
def test_the_papers_budgets_leave_what_sets_the_rows_of_a_table_apart(table: Table) -> None:
    given = [word.replace("{root}", "ROOT") for word in table.overrides]
    override = at_paper_budget(HERE / table.spec, given)
    spec = load_spec(HERE / table.spec, [*given, override])
    built = [create_attack(attack.name, **attack.params) for attack in spec.attacks]
    assert len({repr(attack) for attack in built}) == len(built)
    for attack in built:
        if isinstance(attack, Gias) and "/" not in attack.space:
            assert attack.steps == WHOLE
        if isinstance(attack, GradVit):
            assert attack.patch in (0, attack.presets["paper"]["patch"])
    for attack, small in zip(built, load_spec(HERE / table.spec, given).attacks, strict=True):
        if isinstance(attack, PresetParameters):
            assert attack.preset == "paper"
            assert attack.steps >= small.params.get("steps", 0)


@pytest.mark.parametrize("name", ["vit", "vit_long", "resnet"])
def test_attacks_that_are_held_against_each_other_smooth_alike(name: str) -> None:
    """The weight of total variation decides more than anything else at a few hundred steps."""
    components = load_spec(HERE / "tables" / f"{name}.yaml").attacks
    weights = {getattr(create_attack(c.name, **c.params), "tv", 0.0) for c in components}
    assert weights - {0.0} == {0.5}


def at_the_papers_budget(spec: str) -> dict[str, Attack]:
    """The attacks of a spec at their papers' budgets, by title."""
    path = HERE / spec
    components = load_spec(path, [at_paper_budget(path)]).attacks
    return {c.title or c.name: create_attack(c.name, **c.params) for c in components}


def test_at_the_papers_budget_groups_are_as_large_as_the_papers_and_terms_stay_out() -> None:
    rows = at_the_papers_budget("tables/resnet_terms.yaml")
    assert rows["+ registered group"].seeds == rows["+ lazy group"].seeds == 8  # its section 4.1.2
    assert rows["+ exact BN"].seeds == 1
    alone = rows["matching alone"]
    assert alone.tv == alone.l2 == alone.bn == 0
    alone = at_the_papers_budget("tables/vit_terms.yaml")["matching alone"]
    assert alone.tv == alone.l2 == alone.patch == alone.group == 0


def test_at_the_papers_budget_a_search_that_no_paper_tells_the_steps_of_has_dlgs() -> None:
    """The tables on APRIL have equal evaluations for all: TAG must not stop at a fifteenth."""
    for name in ("april_a", "april_b", "april_frozen", "vit"):
        rows = at_the_papers_budget(f"tables/{name}.yaml")
        assert rows["tag"].steps == rows["dlg"].steps == 6000


def test_at_the_papers_budget_x_with_statistics_keeps_its_group() -> None:
    """GIAS, Appendix H: the baseline has the statistics and the lazy group."""
    rows = at_the_papers_budget("gias/table1.yaml")
    assert rows["x + BN"].group > 0
    assert rows["x + BN"].bn > 0
    assert rows["x"].group == rows["x"].bn == 0
