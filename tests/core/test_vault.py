"""The vault: for its owner alone, and shut while an attack runs."""

from __future__ import annotations

import itertools
import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedsim.core.errors import ForeignTruthError, NotGranted
from fedsim.core.files import save_tensors
from fedsim.core.knowledge import sealed
from fedsim.core.run import Run, address_of, list_observations, state_path, truth_path
from fedsim.core.vault import Truth, Vault


def test_the_vault_is_for_its_owner_only(small_run: Run) -> None:
    assert stat.S_IMODE(small_run.vault.stat().st_mode) == 0o700
    for file in small_run.vault.rglob("*.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_vault_does_not_open_while_an_attack_runs(small_run: Run) -> None:
    round_, client = address_of(list_observations(small_run.observations)[0])
    assert Vault(small_run.vault).read(round_, client).images.shape == (1, 3, 32, 32)
    with sealed(), pytest.raises(NotGranted, match="vault"):
        Vault(small_run.vault).read(round_, client)


def kept(root: Path) -> Vault:
    """Truths of two clients in two rounds, each with a state."""
    vault = Vault(root)
    for round_, client in itertools.product((1, 2), (0, 1)):
        images = torch.full((1, 3, 8, 8), 0.1 * (2 * round_ + client))
        labels, sent = torch.tensor([client]), f"update {round_} {client}"
        vault.write(
            round_, client, Truth(images, labels, [[0]], 0, [], update=sent), {"x": images.mean()}
        )
    return vault


@pytest.mark.parametrize(
    ("moved", "there", "words"),
    [
        ((1, 1), (1, 0), "is of client 1 in round 1, not of client 0 in round 1"),
        ((2, 0), (1, 0), "is of client 0 in round 2, not of client 0 in round 1"),
    ],
)
def test_what_belongs_to_another_client_or_round_is_told(
    tmp_path: Path, moved: tuple[int, int], there: tuple[int, int], words: str
) -> None:
    vault = kept(tmp_path)
    shutil.copy(truth_path(tmp_path, *moved), truth_path(tmp_path, *there))
    with pytest.raises(ForeignTruthError, match=words):
        vault.read(*there)
    vault = kept(tmp_path)
    shutil.copy(state_path(tmp_path, *moved), state_path(tmp_path, *there))
    with pytest.raises(ForeignTruthError, match=words):
        vault.check(*there)


def test_a_truth_is_that_of_one_update(tmp_path: Path) -> None:
    vault = kept(tmp_path)
    assert vault.read(1, 0, "update 1 0").update == "update 1 0"
    with pytest.raises(ForeignTruthError, match="of another update than the one observed"):
        vault.read(1, 0, "update 1 1")


def test_truths_that_do_not_say_whose_they_are_are_taken_as_they_lie(tmp_path: Path) -> None:
    tensors = {"images": torch.zeros(1, 3, 8, 8), "labels": torch.tensor([3])}
    about = {"batches": [[0]], "defense_seed": 0, "trail": [], "stateful": True}
    save_tensors(truth_path(tmp_path, 1, 0), tensors, {"about": json.dumps(about)})
    save_tensors(state_path(tmp_path, 1, 0), {"x": torch.ones(1)})
    assert Vault(tmp_path).read(1, 0, "any update").labels.tolist() == [3]
    Vault(tmp_path).check(1, 0, "any update")


def test_the_digest_of_a_truth_changes_with_what_a_replay_depends_on() -> None:
    truth = Truth(torch.zeros(2, 3, 8, 8), torch.tensor([1, 2]), [[0, 1]], 7, [], update="u")
    others = [
        replace(truth, images=torch.ones(2, 3, 8, 8)),
        replace(truth, labels=torch.tensor([2, 1])),
        replace(truth, batches=[[1, 0]]),
        replace(truth, defense_seed=8),
        replace(truth, update="v"),
    ]
    assert len({one.digest() for one in (truth, *others)}) == 6
