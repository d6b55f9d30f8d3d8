"""The example app, plain and with the lines that audit it, as `flwr run` runs both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import flowers
from tests.flowers import APP, Flower, copied

CODE = sorted((APP / "photoapp").glob("*.py"))


def test_the_app_has_never_heard_of_fedsim() -> None:
    assert len(CODE) == 4
    assert not [file.name for file in CODE if "fedsim" in file.read_text()]


def test_the_patch_adds_a_few_lines_and_takes_none_away() -> None:
    lines = (APP / "audit.patch").read_text().splitlines()
    added = [line for line in lines if re.match(r"\+(?!\+\+)", line)]
    assert not [line for line in lines if re.match(r"-(?!--)", line)]
    assert sum(line == "+import fedsim" for line in added) == 2
    assert sum("fedsim." in line for line in added) == 2
    assert len([line for line in added if line.strip("+ ")]) <= 12


@pytest.fixture(scope="module", params=[flowers.simulation, flowers.deployment])
def flower(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flower]:
    """Flower with nothing started but what the first `flwr run` starts; and a SuperLink with two
    SuperNodes."""
    home = tmp_path_factory.mktemp(request.param.__name__)
    setting: AbstractContextManager[Flower] = request.param(home)
    with setting as flower:
        yield flower


@pytest.mark.slow
def test_the_plain_app_runs(flower: Flower, tmp_path: Path) -> None:
    told = flower.run(copied(tmp_path / "app"), num_server_rounds=2)
    assert told.count("aggregate_train: Received 2 results and 0 failures") == 2
    assert "eval_acc" in told
    assert "Strategy execution finished" in told
