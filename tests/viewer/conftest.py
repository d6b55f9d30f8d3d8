"""What tests of the viewer share: a shelf of runs, and two to compare."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from tests.conftest import small_spec


@pytest.fixture
def shelf(small_run: Run, tmp_path: Path) -> Path:
    """A folder with a copy of the finished run in it."""
    shutil.copytree(small_run.root, tmp_path / "runs" / "done")
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def two(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, the same with noise, and that of another seed; tests only read them."""
    folder = tmp_path_factory.mktemp("two") / "runs"
    shutil.copytree(small_run.root, folder / "plain")
    noise = "defenses=[{name: gaussian_noise, std: 0.01, relative: true}]"
    audit(small_spec(noise), folder / "noisy")
    audit(small_spec("seed=5"), folder / "seeded")
    return folder
