"""Whose word has code imported: the user's own, never that of a directory or a file."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from fedsim.audit.replay import attack_offline
from fedsim.audit.stages import attack_captured, audit
from fedsim.audit.trust import (
    announced_in,
    import_paths,
    named_in,
    refuse_imports,
    refuse_strangers,
)
from fedsim.cli import main
from fedsim.core.errors import RunError, SpecError
from fedsim.core.files import read_json, write_json
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Component, ThreatSpec
from fedsim.lint import lint
from fedsim.tools.positions import analyse
from tests.conftest import small_spec
from tests.strangers import Stranger, announce, invite, shared_run

NAMING = [
    "attacks=[{name: 'stranger:call'}]",
    "attacks=[{name: gias, space: w, architecture: 'stranger:call'}]",
    "defenses=[{name: 'stranger:Defended'}]",
    "data.name='stranger:call'",
    "model={name: 'stranger:call'}",
    "threat={model: D, surrogate: {name: 'stranger:call'}}",
    "threat={model: D, generator: {checkpoint: x, name: 'stranger:call'}}",
]


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stranger:
    return invite(tmp_path / "modules", monkeypatch)


def fedsim(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedsim", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(str(stop.value.code))


@pytest.mark.parametrize("naming", NAMING)
def test_every_way_to_name_code_is_seen(naming: str) -> None:
    spec = small_spec(naming)
    assert {path.partition(":")[0] for path in import_paths(spec)} == {"stranger"}
    with pytest.raises(SpecError, match=r"names code by import path \(stranger:"):
        refuse_imports(spec)
    refuse_imports(spec, trust=True)


def test_what_is_ours_is_nobodys_code() -> None:
    spec = small_spec(
        "attacks=[{name: dlg}, {name: 'fedsim.attacks.dlg:Dlg'}]",
        "defenses=[{name: clipping}]",
        "data.name='hf:owner/name:config'",
        "name='a run: mine'",
        "model={name: 'hf-hub:timm/of-theirs'}",
    )
    assert import_paths(spec) == set()
    elsewhere = small_spec("attacks=[{name: 'attacks.tag:TagAttack'}]")  # anybody's folder
    assert import_paths(elsewhere) == {"attacks.tag:TagAttack"}
    assert import_paths(ThreatSpec(model="D"), Component(name="mine:Own")) == {"mine:Own"}


def test_what_the_user_named_may_stand_in_the_directory(tmp_path: Path) -> None:
    refuse_strangers(tmp_path, {"a:B"}, {"a:B", "c:D"})
    with pytest.raises(RunError, match=r"\(c:D\), which would be run; if it is yours, add --trust"):
        refuse_strangers(tmp_path, {"a:B", "c:D"}, {"a:B"})


@pytest.mark.parametrize("naming", NAMING)
def test_no_command_imports_what_a_shared_run_names(
    small_run: Run,
    tmp_path: Path,
    stranger: Stranger,
    naming: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shared_run(small_run, tmp_path / "shared", small_spec(naming))
    assert named_in(run)
    for words in (
        ("audit", "--resume", run.root),
        ("run", "--resume", run.root),
        ("report", run.root),
        ("score", run.root, "--vault", run.vault),
        ("attack-captured", run.root),
        ("analyze", "pe", run.root),
    ):
        assert fedsim(monkeypatch, *words) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert "names code by import path (stranger:" in told, words
    assert fedsim(monkeypatch, "lint", run.spec_path) == 2
    looks = (lint, run.spec), (analyse, run.root), (attack_captured, run.root)
    for look, what in looks:
        with pytest.raises((RunError, SpecError), match="by import path"):
            look(what)
    assert not stranger.ran


def test_an_observation_that_announces_code_is_not_attacked(
    small_run: Run, tmp_path: Path, stranger: Stranger
) -> None:
    root = shutil.copytree(small_run.root, tmp_path / "shared")
    announce(Run(root), "top_k", "stranger:Defended")
    assert announced_in(Run(root).observations) == {"stranger:Defended"}
    with pytest.raises(RunError, match=r"import path \(stranger:Defended\)"):
        attack_offline(root, Component(name="dlg", steps=1), tmp_path / "out", None, 1)
    with pytest.raises(RunError, match="announces stranger:Defended, which its spec does not name"):
        audit(small_spec(), root)
    assert not stranger.ran


def test_a_model_that_an_observation_announces_is_not_built(
    small_run: Run, tmp_path: Path, stranger: Stranger
) -> None:
    root = shutil.copytree(small_run.root, tmp_path / "shared")
    path = list_observations(Run(root).observations)[0]
    about = read_json(path)
    about["architecture"]["name"] = "stranger:call"
    write_json(path, about)
    assert announced_in(Run(root).observations) == {"stranger:call"}
    with pytest.raises(RunError, match=r"import path \(stranger:call\)"):
        attack_offline(root, Component(name="dlg", steps=1), tmp_path / "out", None, 1)
    assert not stranger.ran


def test_an_observation_travels_alone_and_is_no_more_believed(
    small_run: Run, tmp_path: Path, stranger: Stranger
) -> None:
    root = shutil.copytree(small_run.root, tmp_path / "shared")
    announce(Run(root), "stranger:Defended")
    alone = shutil.copytree(root / "observations" / "round-0001", tmp_path / "mail" / "round-0001")
    attack = Component(name="patch_solve")
    with pytest.raises(RunError, match=r"import path \(stranger:Defended\)"):
        attack_offline(next(alone.glob("client-*.json")), attack, tmp_path, None, 1)
    assert not stranger.ran


def test_a_directory_that_is_trusted_is_believed(
    small_run: Run, tmp_path: Path, stranger: Stranger
) -> None:
    root = shutil.copytree(small_run.root, tmp_path / "shared")
    announce(Run(root), "stranger:Defended")
    alone = shutil.copytree(root / "observations" / "round-0001", tmp_path / "mail" / "round-0001")
    path, attack = sorted(alone.glob("client-*.json"))[0], Component(name="patch_solve")
    (row,) = attack_offline(path, attack, tmp_path / "out", None, 1, trust=True)
    assert stranger.ran
    assert row["failure"] is None


def test_trust_makes_no_observation_one_of_the_run(
    small_run: Run, tmp_path: Path, stranger: Stranger
) -> None:
    root = shutil.copytree(small_run.root, tmp_path / "shared")
    announce(Run(root), "stranger:Defended")
    rows = attack_offline(
        root, Component(name="patch_solve"), tmp_path / "out", None, 1, trust=True
    )
    assert "is not of this run: its defenses is" in rows[0]["failure"]
    assert [row["failure"] for row in rows[1:]] == [None] * 3


def test_a_run_of_ones_own_goes_on_with_its_spec_or_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec("attacks=[{name: 'tests.faults:Declines'}]", "audit.victims=1")
    audit(spec, tmp_path / "run")
    assert audit(spec, tmp_path / "run").summary["verdicts"]
    assert fedsim(monkeypatch, "audit", "--resume", tmp_path / "run") == 1
    assert "add --trust" in " ".join(capsys.readouterr().err.split())
    assert fedsim(monkeypatch, "audit", "--resume", tmp_path / "run", "--trust") == 0
    assert fedsim(monkeypatch, "report", tmp_path / "run", "--trust") == 0
