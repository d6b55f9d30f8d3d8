"""The vault: for its owner alone, and shut while an attack runs."""

from __future__ import annotations

import stat

import pytest

from fedsim.core.errors import NotGranted
from fedsim.core.knowledge import sealed
from fedsim.core.run import Run, address_of, list_observations
from fedsim.core.vault import Vault


def test_the_vault_is_for_its_owner_only(small_run: Run) -> None:
    assert stat.S_IMODE(small_run.vault.stat().st_mode) == 0o700
    for file in small_run.vault.rglob("*.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_vault_does_not_open_while_an_attack_runs(small_run: Run) -> None:
    round_, client = address_of(list_observations(small_run.observations)[0])
    assert Vault(small_run.vault).read(round_, client).images.shape == (1, 3, 32, 32)
    with sealed(), pytest.raises(NotGranted, match="vault"):
        Vault(small_run.vault).read(round_, client)
