"""The commands of a real deployment: deal, deploy, score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from fedsim.cli import app
from fedsim.clients.dealing import PUBLIC, open_holding, read_public
from fedsim.core.errors import SpecError
from tests.conftest import small_spec


def test_deal_writes_a_folder_for_every_client(tmp_path: Path) -> None:
    spec = small_spec("data.image_size=16")
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    words = ["deal", str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "dealt"), "data.clients=3"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    changed = small_spec("data.image_size=16", "data.clients=3")
    indices = [
        open_holding(tmp_path / "dealt" / str(client), changed, client).indices
        for client in range(3)
    ]
    assert sorted(np.concatenate(indices)) == list(range(512))
    assert read_public(tmp_path / "dealt" / PUBLIC, changed) == 8


def test_keys_and_no_security_are_not_asked_for_at_once(tmp_path: Path) -> None:
    words = ["deploy", "data.clients=2", "-o", str(tmp_path / "d"), "--insecure"]
    result = CliRunner().invoke(app, [*words, "--keys", str(tmp_path)])
    assert isinstance(result.exception, SpecError)
    assert not (tmp_path / "d").exists()
