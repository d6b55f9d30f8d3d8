"""Paths of a run: one name for each thing, and back from the name to the thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.core.errors import ObservationError
from fedsim.core.run import (
    Run,
    address_of,
    failure_path,
    lesson_path,
    list_lessons,
    list_observations,
    notebook_path,
    observation_path,
    paths,
    result_path,
)


def test_a_round_and_a_client_are_read_from_the_name_they_gave() -> None:
    assert address_of(observation_path(Path("run"), 3, 12)) == (3, 12)
    with pytest.raises(ObservationError, match=r"named round-0001/client-0000\.json"):
        address_of(Path("run/somewhere/else.json"))


def test_what_becomes_of_a_job_lies_side_by_side() -> None:
    result = result_path(Path("there"), "gradvit", 1, 2, 0)
    assert result == Path("there/gradvit/round-0001/client-0002-trial-0.safetensors")
    assert failure_path(result).name == "client-0002-trial-0.failed.json"
    assert notebook_path(result).name == "client-0002-trial-0.unfinished.safetensors"
    assert failure_path(lesson_path(Path("memory"), 7)).name == "lesson-0007.failed.json"


def test_lessons_are_listed_without_those_that_failed(tmp_path: Path) -> None:
    for lesson in (2, 1):
        lesson_path(tmp_path, lesson).write_text("{}")
    failure_path(lesson_path(tmp_path, 3)).write_text("{}")
    assert list_lessons(tmp_path) == [lesson_path(tmp_path, 1), lesson_path(tmp_path, 2)]


def test_a_run_holds_nothing_that_has_no_name_here(small_run: Run) -> None:
    named = {
        value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)
    }
    at_the_top = {path.name for path in small_run.root.iterdir()}
    assert at_the_top - named == {"scores.parquet"}  # beside scores.csv
    assert len(list_observations(small_run.observations)) == 4
