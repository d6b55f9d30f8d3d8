"""The commit that a number is of: that of fedsim's own repository, and of no other."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedsim.audit.checkout import ROOT, commit_of
from fedsim.audit.stages import versions

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on PATH")


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_a_checkout_tells_its_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = commit_of(tmp_path)
    assert clean is not None
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    (tmp_path / "file").write_text("two")
    commit_of.cache_clear()
    assert commit_of(tmp_path) == f"{clean}-dirty"


def test_a_package_in_somebody_elses_repository_tells_none(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") is None


def test_versions_name_the_commit_where_there_is_one() -> None:
    assert versions().get("commit") == commit_of(ROOT)
    assert "fedsim" in versions()
