"""Flower's programs: started, watched, and ended with all that they started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from fedsim.cluster.processes import child_of, descendants
from fedsim.core.errors import RunError
from fedsim.core.files import write_json
from fedsim.deploy.flower import Processes, end_recorded
from tests.deploy.conftest import assert_none_alive


def _sleeper(folder: Path) -> Processes:
    processes = Processes(record=folder / "processes.json")
    processes.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], folder)
    return processes


def test_what_a_killed_deployment_left_is_ended(tmp_path: Path) -> None:
    processes = _sleeper(tmp_path)
    (process, _) = processes.running["sleeper"]
    try:
        assert process.poll() is None
        end_recorded(tmp_path / "processes.json")
        assert not child_of(process).lives
        assert not (tmp_path / "processes.json").exists()
        end_recorded(tmp_path / "processes.json")
    finally:
        processes.stop()


def test_a_process_that_has_the_number_of_another_is_left_alone(tmp_path: Path) -> None:
    processes = _sleeper(tmp_path)
    (process, _) = processes.running["sleeper"]
    try:
        write_json(tmp_path / "processes.json", [{"pid": process.pid, "began": "1"}])
        end_recorded(tmp_path / "processes.json")
        assert process.poll() is None
    finally:
        processes.stop()


def test_a_damaged_record_of_processes_is_one_sentence(tmp_path: Path) -> None:
    odd = [f'[{{"pid": {pid}, "began": 1.0}}]' for pid in (0, 1, -1, "true", 2**40, 1e999)]
    for content in ("{", '[{"pid": "x"}]', "3", *odd):
        (tmp_path / "processes.json").write_text(content)
        with pytest.raises(RunError, match="is damaged; look for"):
            end_recorded(tmp_path / "processes.json")


def test_a_helper_that_left_its_group_is_ended_as_well(tmp_path: Path) -> None:
    mark = f"helper of {tmp_path}"
    helper = f"import time; time.sleep(600) # {mark}"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {helper!r}], start_new_session=True)\n"
        "time.sleep(600)"
    )
    processes = Processes()
    try:
        processes.start("parent", [sys.executable, "-c", parent], tmp_path)
        pid = processes.running["parent"][0].pid
        end = time.monotonic() + 30
        while not descendants(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert descendants(pid)
    finally:
        processes.stop()
    assert_none_alive(mark)
