"""What our commands leave behind: their results, their cache, and nothing else on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import small_spec
from tests.traces import assert_no_process_with, files_in, processes_with

ALL_AT_ONCE = """
import json, sys
from typer.testing import CliRunner
from fedsim.cli import app

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
"""
# What other libraries keep for every program of the user's, wherever it comes from.
OURS = (".cache/fedsim", ".local/state/fedsim/vault-keys")
THEIRS = (".cache/matplotlib", ".config/matplotlib")


class User:
    """Somebody with a home and a folder for temporary files that nobody else writes to."""

    def __init__(self, root: Path, temporary: Path):
        self.home, self.work, self.temporary = root / "home", root / "work", temporary
        self.home.mkdir()
        self.work.mkdir()
        self.spec = root / "spec.yaml"
        self.spec.write_text(small_spec().to_yaml())
        hidden = ("FEDSIM_", "FLWR_", "RAY_", "TORCHINDUCTOR_", "XDG_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {
            "HOME": str(self.home),
            "TMPDIR": str(temporary),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str | Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fedsim.cli", *map(str, words)]
        return subprocess.Popen(
            command, cwd=self.work, env=self.environment, stdout=subprocess.PIPE
        )

    def does(self, *words: str | Path) -> None:
        process = self.start(*words)
        told, _ = process.communicate(timeout=500)
        assert process.returncode == 0, told.decode()

    def check_nothing_is_left(self) -> None:
        assert_no_process_with(f"HOME={self.home}")
        assert [path.name for path in self.temporary.iterdir()] == []
        known = tuple(str(self.home / name) for name in (*OURS, *THEIRS))
        assert [f for f in files_in(self.home) if not f.startswith(known)] == []


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as temporary:  # Ray wants a short path
        yield User(tmp_path, Path(temporary))


@pytest.mark.slow
def test_commands_leave_results_and_a_cache_alone(user: User) -> None:
    commands = [
        ["list", "attacks"],
        ["keys", "keys", "--nodes", "1"],
        ["audit", str(user.spec), "-o", "run"],
    ]
    subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE, json.dumps(commands)],
        cwd=user.work,
        env=user.environment,
        check=True,
    )
    user.check_nothing_is_left()
    assert {path.name for path in user.work.iterdir()} == {"keys", "run"}


def test_a_file_or_process_that_is_left_would_be_seen(user: User) -> None:
    user.check_nothing_is_left()
    (user.temporary / "ray").mkdir()
    with pytest.raises(AssertionError):
        user.check_nothing_is_left()
    (user.temporary / "ray").rmdir()
    (user.home / ".flwr").write_text("")
    with pytest.raises(AssertionError):
        user.check_nothing_is_left()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(sleeper, env=user.environment, start_new_session=True)
    try:
        end = time.monotonic() + 20
        while not processes_with(f"HOME={user.home}") and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(AssertionError):
            assert_no_process_with(f"HOME={user.home}", seconds=0.2)
    finally:
        process.kill()
        process.wait()


RAY = "engine={kind: ray, device: cpu, cpus: 1}"


@pytest.mark.slow
def test_a_ray_of_a_runs_own_leaves_nothing_even_after_a_kill(user: User) -> None:
    user.does("audit", user.spec, "-o", "run", RAY)
    user.check_nothing_is_left()
    killed = user.start("audit", user.spec, "-o", "again", RAY)
    end = time.monotonic() + 200
    while not list(user.temporary.glob("fedsim-ray-*/session_*")) and time.monotonic() < end:
        time.sleep(0.1)
    killed.kill()
    killed.communicate()
    assert_no_process_with(f"HOME={user.home}")
    assert [path.name[:11] for path in user.temporary.iterdir()] == ["fedsim-ray-"]
    user.does("audit", "--resume", "again")
    user.check_nothing_is_left()


@pytest.mark.slow
def test_a_cluster_that_was_up_leaves_nothing(user: User) -> None:
    user.does("cluster", "up", "--cpus", "1")
    try:
        user.does("audit", user.spec, "-o", "run", RAY.replace("cpus: 1", "address: auto"))
    finally:
        user.does("cluster", "down")
    user.check_nothing_is_left()
    state = user.home / ".cache" / "fedsim"
    assert not (state / "cluster.json").exists()
    assert not list((state / "clusters").iterdir())


@pytest.mark.slow
def test_a_deployment_leaves_nothing_but_its_folder(user: User) -> None:
    user.does("deploy", user.spec, "-o", "d", "--nodes", "2")
    user.check_nothing_is_left()
    assert [path.name for path in user.work.iterdir()] == ["d"]
