"""The environment is set by the rooms that start Flower or Ray, and by nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedsim.core.environment import keep_to_ourselves


def test_what_is_set_stays_and_the_rest_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.delenv("FLWR_HOME", raising=False)
    keep_to_ourselves()
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "1"
    assert os.environ["FLWR_HOME"] == str(tmp_path / "flwr")
