"""Knowledge: what is not granted cannot be read, what is read is on record."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedsim.core.errors import NotGranted
from fedsim.core.knowledge import FIELDS, THREATS, View
from fedsim.core.observation import list_observations, read_observation
from fedsim.core.run import Run


def view(run: Run, threat: str, **more) -> View:
    observation = read_observation(list_observations(run.observations)[0])
    return View(observation, THREATS[threat].grants, architecture=torch.nn.Identity, **more)


def test_threats_grant_what_the_table_says() -> None:
    order = "ABCDE"
    for weaker, stronger in itertools.pairwise(order):
        assert THREATS[weaker].grants < THREATS[stronger].grants
    assert THREATS["F"].grants == THREATS["C"].grants | {"tampering"}
    assert all(threat.grants <= FIELDS.keys() for threat in THREATS.values())
    assert not any("oracle_labels" in threat.grants for threat in THREATS.values())


def test_reading_what_is_not_granted_raises(small_run: Run) -> None:
    eavesdropper = view(small_run, "A")
    assert eavesdropper.update.tensors
    for field in ("image_size", "batch_size", "normalisation", "learning_rate", "defenses"):
        with pytest.raises(NotGranted, match=field):
            getattr(eavesdropper, field)
    with pytest.raises(NotGranted, match="architecture"):
        eavesdropper.model()
    with pytest.raises(NotGranted, match="oracle_labels"):
        _ = view(small_run, "E", oracle_labels=torch.tensor([1])).oracle_labels


def test_what_is_not_granted_is_not_even_there(small_run: Run) -> None:
    held = vars(view(small_run, "A", oracle_labels=torch.tensor([1]), surrogate=torch.ones(1)))
    assert set(held["_known"]) == {"update", "weights"}


def test_every_read_is_in_the_ledger(small_run: Run) -> None:
    informed = view(small_run, "B")
    assert informed.ledger == []
    _ = informed.batch_size, informed.update, informed.batch_size
    assert informed.ledger == ["batch_size", "update"]
    assert not informed.grants("learning_rate")
    assert informed.ledger == ["batch_size", "update"]


def test_the_attackers_coin_is_its_own(small_run: Run) -> None:
    first, second = view(small_run, "B", seed=3), view(small_run, "B", seed=3)
    assert torch.equal(
        torch.rand(3, generator=first.coin()), torch.rand(3, generator=second.coin())
    )
