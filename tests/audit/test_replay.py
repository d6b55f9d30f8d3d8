"""Attacks replayed on what was captured before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from fedsim.audit.replay import attack_offline
from fedsim.core.errors import NotGranted, ObservationError
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Component

PATCH_SOLVE = Component(name="patch_solve")


def test_an_observation_a_round_and_a_run_can_be_attacked(small_run: Run, tmp_path: Path) -> None:
    one = list_observations(small_run.observations)[0]
    sources = (one, one.with_suffix(""), one.parent, small_run.observations, small_run.root)
    counts = [
        len(attack_offline(source, PATCH_SOLVE, tmp_path / str(n), None, 1))
        for n, source in enumerate(sources)
    ]
    assert counts == [1, 1, 2, 4, 4]


def test_every_trial_has_a_row_with_its_score_and_its_picture(
    small_run: Run, tmp_path: Path
) -> None:
    source = list_observations(small_run.observations)[0]
    rows = attack_offline(source, PATCH_SOLVE, tmp_path, None, 2)
    assert [row["trial"] for row in rows] == [0, 1]
    assert [row["psnr"] for row in rows] == [[160.0]] * 2
    with Image.open(rows[0]["picture"]) as picture:
        assert picture.size == (32, 32)


def test_an_offline_attack_without_a_vault_is_not_scored(small_run: Run, tmp_path: Path) -> None:
    found = shutil.copytree(small_run.observations, tmp_path / "found" / "observations")
    rows = attack_offline(found, PATCH_SOLVE, None, None, 1)
    assert [row["psnr"] for row in rows] == [None] * 4
    assert [row["failure"] for row in rows] == [None] * 4
    assert [row["unscored"] for row in rows] == ["no vault"] * 4
    assert (tmp_path / "found" / "offline").is_dir()


def test_an_attack_that_declines_is_a_row_with_its_reason(small_run: Run, tmp_path: Path) -> None:
    source = list_observations(small_run.observations)[0]
    (row,) = attack_offline(source, Component(name="tests.faults:Declines"), tmp_path, None, 1)
    assert "does not apply here" in row["failure"]
    assert row["picture"] is None


def test_what_cannot_be_attacked_is_one_sentence(small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="there is no observation"):
        attack_offline(tmp_path / "nowhere", PATCH_SOLVE, tmp_path, None, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ObservationError, match="holds no observation"):
        attack_offline(tmp_path / "empty", PATCH_SOLVE, tmp_path, None, 1)
    with pytest.raises(NotGranted, match="'patch_solve' needs"):
        attack_offline(small_run.observations, PATCH_SOLVE, tmp_path, "A", 1)


def test_an_attack_on_another_ones_update_says_why_it_is_not_scored(
    small_run: Run, tmp_path: Path
) -> None:
    root = shutil.copytree(small_run.root, tmp_path / "run")
    first, second = sorted((root / "vault" / "round-0001").glob("*.safetensors"))
    shutil.copy(first, second)
    path = root / "observations" / "round-0001" / f"{second.stem}.json"
    (row,) = attack_offline(path, PATCH_SOLVE, tmp_path / "out", None, 1)
    assert row["psnr"] is None
    assert "was put in the place of another" in row["unscored"]
