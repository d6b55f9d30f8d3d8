"""What the commands share: which spec, which directory, which parameters, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim import default_output
from fedsim.cli.shared import checked_spec, component_of, quoted, target, tell_verdicts, values_of
from fedsim.core.errors import SpecError
from fedsim.core.run import Run


def test_the_first_override_may_stand_in_the_place_of_the_file(tmp_path: Path) -> None:
    assert checked_spec("train.rounds=7", ["seed=2"]).train.rounds == 7
    file = tmp_path / "a=b.yaml"
    file.write_text("seed: 5")
    assert checked_spec(str(file), None).seed == 5


def test_a_run_goes_where_it_is_told_or_where_its_digest_says(tmp_path: Path) -> None:
    spec, where = target(None, ["seed=2"], None, None)
    assert where == default_output(spec)
    assert target(None, ["seed=2"], tmp_path, None) == (spec, tmp_path)


def test_a_directory_is_resumed_with_its_own_spec_alone(small_run: Run) -> None:
    assert target(None, None, None, small_run.root) == (small_run.spec, small_run.root)
    with pytest.raises(SpecError, match="--resume takes the directory alone"):
        target(None, ["seed=2"], None, small_run.root)


def test_parameters_are_yaml() -> None:
    assert values_of(["steps=3", "parts=[head, mlp]", "title=a b"]) == {
        "steps": 3,
        "parts": ["head", "mlp"],
        "title": "a b",
    }
    assert component_of("dlg", ["steps=3"]).params == {"steps": 3}
    with pytest.raises(SpecError, match="'steps' is not a parameter; write key=value"):
        values_of(["steps"])


def test_an_override_with_a_space_is_quoted_for_the_shell() -> None:
    assert [quoted(o) for o in ("a=1", "a=[1, 2]")] == ["a=1", '"a=[1, 2]"']


def test_verdicts_events_and_crashes_are_told_and_what_declined_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = [
        {"job": "j", "kind": kind, "reason": f"it {kind}"} for kind in ("crashed", "declined")
    ]
    tell_verdicts(
        {
            "verdicts": [{"verdict": "LEAKS", "words": "dlg recovered 4 pictures"}],
            "events": [{"kind": "client_failed", "message": "it broke", "round": 2}],
            "failed_jobs": failed,
        }
    )
    out, err = capsys.readouterr()
    assert "LEAKS dlg recovered 4 pictures" in out
    assert "round 2: it broke" in err
    assert "it crashed" in err
    assert "it declined" not in err
