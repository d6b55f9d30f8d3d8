"""Attacks replayed on what was captured before."""

from __future__ import annotations

import json
from pathlib import Path

from fedsim.core.run import Run


def test_an_offline_attack_without_a_vault_is_not_scored(
    run_cli, small_run: Run, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(small_run.observations, tmp_path / "found" / "observations")
    code, out, _ = run_cli(
        "attack", tmp_path / "found" / "observations", "--attack", "patch_solve", "--json"
    )
    assert code == 0
    assert [row["psnr"] for row in json.loads(out)] == [None] * 4
