"""The record of a run: kept twice, and each of the two is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedsim.core.errors import DamagedError
from fedsim.core.files import parse_json, read_json
from fedsim.core.run.record import Record, read_record, read_sheet, sheet_is_broken, write_record
from fedsim.core.spec import Spec, load_spec
from tests.planted import flip

SPEC = load_spec({}, ["name=mine", "train.rounds=3", "attacks=[{name: dlg, lr: 1.0e-05}]"])
RECORD = Record.of(SPEC, deployed=True, classes=7)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    assert write_record(tmp_path, RECORD) == ["spec.yaml", "run.json"]
    return tmp_path


def test_either_file_is_the_whole_record(root: Path) -> None:
    assert read_record(root) == RECORD
    for name in ("run.json", "spec.yaml"):
        held = (root / name).read_bytes()
        (root / name).unlink()
        assert read_record(root) == RECORD
        assert write_record(root, RECORD) == [name]
        assert (root / name).read_bytes() == held
    assert write_record(root, RECORD) == []


def test_to_whoever_reads_the_spec_the_record_is_a_comment(root: Path) -> None:
    assert load_spec(root / "spec.yaml") == SPEC
    assert yaml.safe_load((root / "spec.yaml").read_text()) == SPEC.model_dump(mode="json")
    assert Spec.model_validate(read_json(root / "run.json")["spec"]) == SPEC


def _is_damaged(content: bytes) -> bool:
    try:
        parse_json(content, "it")
    except DamagedError:
        return True
    return False


is_broken = {"run.json": _is_damaged, "spec.yaml": sheet_is_broken}


@pytest.mark.parametrize("name", is_broken)
def test_a_bit_that_turned_anywhere_in_one_is_found_and_the_other_tells(
    name: str, root: Path
) -> None:
    whole = (root / name).read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            content = bytearray(whole)
            content[at] ^= 1 << bit
            assert is_broken[name](bytes(content)), (at, bit)
    for at in (0, 100, len(whole) - 25, len(whole) - 1):
        flip(root / name, at, at % 8)
        assert read_record(root) == RECORD
        assert write_record(root, RECORD) == [name]
        assert (root / name).read_bytes() == whole


def test_both_lost_say_nothing(root: Path) -> None:
    flip(root / "run.json", 40, 1)
    flip(root / "spec.yaml", 40, 1)
    assert read_record(root) is None
    assert sheet_is_broken(read_sheet(root))
    (root / "spec.yaml").unlink()
    assert read_record(root) is None
    assert read_sheet(root) is None
    assert not sheet_is_broken(None)


def test_a_run_from_before_has_the_two_apart(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.to_yaml() + "# a comment of mine\n")
    assert read_record(tmp_path) is None
    (tmp_path / "run.json").write_text('{"started": 1.5, "digest": "abc", "deployed": false}')
    assert read_record(tmp_path) == Record(1.5, "abc", deployed=False)


@pytest.mark.parametrize("content", ["[]", "{}", '{"started": 3}', "", "{"])
def test_what_is_no_record_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    assert read_record(tmp_path) is None
