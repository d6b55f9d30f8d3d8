"""A Ray's own folder: apart from other Rays', gone with its process, swept after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._common.utils import get_ray_address_file

from fedsim.cluster import folders
from fedsim.cluster.processes import Child, began
from fedsim.cluster.session import ray_session
from fedsim.core.files import read_json, write_json
from tests.conftest import small_spec


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "place", lambda: tmp_path)
    return tmp_path


def _names(place: Path) -> list[str]:
    return sorted(folder.name for folder in place.iterdir())


def test_a_folder_is_there_for_a_while(place: Path) -> None:
    with folders.kept() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "sockets").mkdir()
        with folders.kept():
            assert len(_names(place)) == 2, "another's folder is left alone while it lives"
    assert _names(place) == []


def test_a_folder_goes_when_its_owner_fails(place: Path) -> None:
    with pytest.raises(KeyError), folders.kept():
        raise KeyError
    assert _names(place) == []


def test_a_folder_that_was_given_away_goes_with_its_new_owner(place: Path) -> None:
    folder = folders.make()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        folders.give(folder, Child(sleeper.pid, began(sleeper.pid)))
        folders.sweep()
        assert folder.exists()
    finally:
        sleeper.kill()
        sleeper.wait()
    folders.sweep()
    assert not folder.exists()


def _gone(folder: Path, **more: object) -> Path:
    """A folder of ours whose process is gone."""
    folder.mkdir()
    folders.give(folder, Child(os.getpid(), 1.0))
    file = folder / folders.OWNER
    write_json(file, read_json(file) | more)
    return folder


def test_what_is_not_surely_left_over_is_left_alone(place: Path) -> None:
    kept = [
        _gone(place / "fedsim-ray-elsewhere", machine=["another", "pid:[1]"]),
        _gone(place / "fedsim-ray-damaged", pid="x"),
        _gone(place / "other-ray"),
    ]
    old = place / "fedsim-ray-of-another-version"
    (old / "session").mkdir(parents=True)
    os.utime(old, (1, 1))
    (place / "fedsim-ray-new").mkdir()
    linked = _gone(place / "target")
    (place / "fedsim-ray-link").symlink_to(linked)
    swept = _gone(place / "fedsim-ray-left")
    empty = place / "fedsim-ray-empty"
    empty.mkdir()
    os.utime(empty, (1, 1))
    folders.sweep()
    assert not swept.exists()
    assert not empty.exists()
    for folder in (*kept, old, place / "fedsim-ray-new", linked, place / "fedsim-ray-link"):
        assert folder.exists(), folder.name


def test_a_folder_is_ours_that_was_made_here_for_this_user(place: Path) -> None:
    made = folders.make()
    assert folders.is_ours(made)
    (place / "below").mkdir()
    elsewhere = _gone(place / "below" / "fedsim-ray-elsewhere")
    bare = place / "fedsim-ray-bare"
    bare.mkdir()
    (place / "fedsim-ray-link").symlink_to(made)
    for folder in (elsewhere, bare, _gone(place / "other"), place / "fedsim-ray-link", place):
        assert not folders.is_ours(folder), folder.name
    assert not folders.is_ours(place / "absent")
    assert not folders.is_ours(made / ".." / "other")


@pytest.mark.slow
def test_a_session_leaves_nothing_in_rays_usual_folder() -> None:
    usual = Path(get_ray_address_file(None))
    with ray_session(small_spec("engine={kind: ray, cpus: 1}").engine):
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        (folder,) = [parent for parent in session.parents if parent.name.startswith("fedsim-ray-")]
        assert folder.parent == folders.place()
        address = ray.get_runtime_context().gcs_address
    assert not folder.exists()
    assert not usual.is_file() or usual.read_text() != address
