"""Runs that tests of the audit copy and damage."""

from __future__ import annotations

import pytest

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from tests.conftest import small_spec
from tests.planted import RICH, tiny_spec
from tests.staging import short_report


@pytest.fixture
def quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is one more file, and most of the time; its own tests read it."""
    monkeypatch.setattr("fedsim.report.write_report", short_report)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(tiny_spec(), tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture(scope="session")
def rich_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(small_spec(*RICH), tmp_path_factory.mktemp("rich") / "run")
