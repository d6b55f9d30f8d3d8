"""The example app, plain and with the lines that audit it, as `flwr run` runs both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedsim.core.run import Run
from tests import flowers
from tests.flowers import APP, NODES, Flower, copied, patched

CODE = sorted((APP / "photoapp").glob("*.py"))
ROUNDS = 2


def test_the_app_has_never_heard_of_fedsim() -> None:
    assert len(CODE) == 4
    assert not [file.name for file in CODE if "fedsim" in file.read_text()]


def test_the_patch_adds_a_few_lines_and_takes_none_away() -> None:
    lines = (APP / "audit.patch").read_text().splitlines()
    added = [line for line in lines if re.match(r"\+(?!\+\+)", line)]
    assert not [line for line in lines if re.match(r"-(?!--)", line)]
    assert sum(line == "+import fedsim" for line in added) == 2
    assert sum("fedsim." in line for line in added) == 2
    assert len(added) <= 12


def test_the_patch_fits(tmp_path: Path) -> None:
    app = patched(copied(tmp_path / "app"))
    for name in ("client_app.py", "server_app.py"):
        content = (app / "photoapp" / name).read_text()
        compile(content, name, "exec")
        assert "import fedsim" in content


@pytest.fixture(params=[flowers.simulation, flowers.deployment])
def flower(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Flower]:
    """Flower with nothing started but what the first `flwr run` starts; and a SuperLink with two
    SuperNodes. Each test has its own: clients that are simulated import an app from the folder in
    which the SuperLink was started, if there is one of that name."""
    setting: AbstractContextManager[Flower] = request.param(tmp_path / "home")
    with setting as flower:
        yield flower


@pytest.mark.slow
def test_the_plain_app_runs(flower: Flower, tmp_path: Path) -> None:
    told = flower.run(copied(tmp_path / "app"), num_server_rounds=ROUNDS)
    assert_whole(told)
    assert "fedsim" not in told


@pytest.mark.slow
def test_three_lines_show_that_it_leaks(flower: Flower, tmp_path: Path) -> None:
    app = patched(copied(tmp_path / "app"))
    told = flower.run(app, num_server_rounds=ROUNDS)
    assert_whole(told)
    root = captured(told)
    said = flower.fedsim(app, "audit", str(root))
    assert "LEAKS patch_solve" in said
    run = Run(root)
    assert run.report.is_file()
    rows = run.scores[run.scores["attack"] == "patch_solve"]
    assert len(rows) == ROUNDS * NODES
    assert (rows["psnr"] > 45).all()
    assert (rows["label_true"] == rows["label_recovered"]).all()
    assert (rows["canary"] < 1e-4).all()


@pytest.mark.slow
def test_with_local_epochs_labels_are_left_and_the_verdict_says_so(
    flower: Flower, tmp_path: Path
) -> None:
    app = patched(copied(tmp_path / "app"))
    several = {"pictures_per_round": 6, "batch_size": 3, "local_epochs": 2}
    told = flower.run(app, num_server_rounds=1, **several)
    root = captured(told)
    attacks = "attacks=[{name: inverting_gradients, steps: 8}]"
    said = flower.fedsim(app, "audit", str(root), attacks)
    assert re.search(r"^(NOT RECOVERED|PARTIAL) inverting_gradients", said, flags=re.M)
    run = Run(root)
    rows = run.scores[run.scores["attack"] == "inverting_gradients"]
    assert (rows["canary"] < 1e-4).all()
    assert float((rows["label_true"] == rows["label_recovered"]).mean()) >= 0.75


def assert_whole(told: str) -> None:
    results = f"aggregate_train: Received {NODES} results and 0 failures"
    assert told.count(results) == ROUNDS
    assert "eval_acc" in told
    assert "Strategy execution finished" in told


def captured(told: str) -> Path:
    """Where the run is captured, as Flower's log says."""
    (root,) = re.findall(r"this run is captured in (\S+);", told)
    return Path(root)
