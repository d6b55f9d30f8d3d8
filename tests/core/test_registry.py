"""Names to classes: entries, import paths, and errors that name the nearest right word."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from fedsim.core.errors import SpecError
from fedsim.core.registry import build, code_digest, find, is_registered, resolve
from fedsim.core.seal import is_sealed


@dataclass(frozen=True)
class Thing:
    """For the tests."""

    size: Annotated[int, Field(ge=1)] = 3
    name: str = "thing"
    made: int = field(default=0, init=False)


class NoDataclass:
    """Has no parameters that could be checked."""


TABLE = {"thing": f"{__name__}:Thing", "bare": f"{__name__}:NoDataclass"}


def test_a_name_or_an_import_path_gives_the_class() -> None:
    assert resolve("thing", TABLE, "thing") is Thing
    assert resolve("thing", {}, f"{__name__}:Thing") is Thing
    assert find("thing", TABLE, "bare") is NoDataclass


def test_parameters_are_checked_and_converted() -> None:
    assert build("thing", TABLE, "thing", {"size": 5}) == Thing(5)
    assert build("thing", TABLE, "thing", {}) == Thing()


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("thin", {}, r"unknown thing 'thin' \(did you mean 'thing'\?\); known: bare, thing"),
        ("bare", {}, "must be a dataclass of its parameters"),
        ("nowhere:Thing", {}, "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:Nothing", {}, "cannot be imported: AttributeError"),
        ("thing", {"sise": 1}, r"no parameter 'sise' \(did you mean 'size'\?\); it takes: size"),
        ("thing", {"made": 1}, "no parameter 'made'"),
        ("thing", {"size": 0}, r"size: .*greater than or equal to 1 \(got 0\)"),
        ("thing", {"size": "large"}, r"size: .*integer.*\(got 'large'\)"),
    ],
)
def test_a_mistake_is_one_sentence(name: str, params: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        build("thing", TABLE, name, params)
    assert "\n" not in str(caught.value)


def test_our_own_modules_are_found_by_the_names_they_had() -> None:
    from fedsim.attacks.dlg import Dlg

    assert resolve("attack", {}, "attacks.dlg:Dlg") is Dlg
    with pytest.raises(SpecError, match="cannot be imported"):
        resolve("attack", {}, "attacks.nothing:Dlg")


@dataclass(frozen=True)
class Curious:
    """Looks about while it is made."""

    sealed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sealed", is_sealed())


def test_an_authors_code_is_run_under_the_seal_of_the_vault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build("thing", {}, f"{__name__}:Curious", {}).sealed
    code = "from fedsim.core.seal import is_sealed\nFOUND = is_sealed()\n"
    (tmp_path / "an_authors_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find("thing", {}, "an_authors_module:FOUND") is True
    assert not is_sealed()


def test_an_entry_is_ours_by_its_name_and_by_its_path() -> None:
    table = {"dlg": "fedsim.attacks.dlg:Dlg"}
    for name in ("dlg", "fedsim.attacks.dlg:Dlg"):
        assert is_registered(table, name)
    others = ("", "tag", "fedsim.attacks.tag:TagAttack", "dlg:Dlg", "fedsim.attacks.dlg:Other")
    for name in (*others, "attacks.dlg:Dlg"):  # the last may be somebody's own folder
        assert not is_registered(table, name)


def test_the_code_behind_an_import_path_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "authored.py"
    file.write_text("class Thing: pass\n")
    (tmp_path / "handed_on.py").write_text("from authored import Thing\n")
    before, on = (code_digest(TABLE, f"{name}:Thing") for name in ("authored", "handed_on"))
    assert before
    assert on not in (before, "")
    assert code_digest(TABLE, f"{__name__}:Thing") == "", "an entry of the table is ours"
    file.write_text("class Thing: size = 1\n")
    assert code_digest(TABLE, "authored:Thing") == before, "what was imported is what runs"
    for name in ("authored", "handed_on"):
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    again = [code_digest(TABLE, f"{name}:Thing") for name in ("authored", "handed_on")]
    assert before not in again
    assert on not in again


def test_a_module_beside_the_command_is_found_behind_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_my_own.py").write_text("chosen = 5")
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert find("thing", {}, "of_my_own:chosen") == 5
    assert sys.path[-1] == str(tmp_path)
    monkeypatch.delitem(sys.modules, "json")
    assert callable(find("thing", {}, "json:loads"))
