"""Knowledge: what is not granted cannot be read, what is read is on record, the vault is shut."""

from __future__ import annotations

import contextlib
import itertools
import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.core.errors import NotGranted, ObservationError, SpecError
from fedsim.core.knowledge import (
    FIELDS,
    READERS,
    THREATS,
    Announced,
    Assets,
    Desk,
    Secrets,
    Traffic,
    View,
    granted_by,
    refuse_unplayed,
    sealed,
)
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, address_of, list_observations
from fedsim.core.spec import ThreatSpec
from fedsim.core.vault import Vault


def view(run: Run, threat: str, granted: frozenset[str] | None = None, **more) -> View:
    observation = read_observation(list_observations(run.observations)[0])
    granted = THREATS[threat].grants if granted is None else granted
    return View(observation, granted, Announced(torch.nn.Identity), **more)


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
        _ = view(small_run, "E", secrets=Secrets(torch.tensor([1]))).oracle_labels


def test_what_is_not_granted_is_not_even_there(small_run: Run) -> None:
    held = vars(
        view(small_run, "A", secrets=Secrets(torch.tensor([1])), assets=Assets(torch.ones(1)))
    )
    assert set(held["_known"]) == {"update", "weights"}


def test_every_read_is_in_the_ledger(small_run: Run) -> None:
    informed = view(small_run, "B")
    assert informed.ledger == []
    _ = informed.batch_size, informed.update, informed.batch_size
    assert informed.ledger == ["batch_size", "update"]
    assert not informed.grants("learning_rate")
    assert informed.ledger == ["batch_size", "update"]


def test_the_attackers_coin_is_its_own(small_run: Run) -> None:
    first, second = (view(small_run, "B", desk=Desk(3)) for _ in range(2))
    assert torch.equal(
        torch.rand(3, generator=first.coin()), torch.rand(3, generator=second.coin())
    )


def test_the_vault_is_for_its_owner_only(small_run: Run) -> None:
    assert stat.S_IMODE(small_run.vault.stat().st_mode) == 0o700
    for file in small_run.vault.rglob("*.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_vault_does_not_open_while_an_attack_runs(small_run: Run) -> None:
    round_, client = address_of(list_observations(small_run.observations)[0])
    assert Vault(small_run.vault).read(round_, client).images.shape == (1, 3, 32, 32)
    with sealed(), pytest.raises(NotGranted, match="vault"):
        Vault(small_run.vault).read(round_, client)


def test_no_observation_file_holds_a_training_pixel_or_label(small_run: Run) -> None:
    """Every number the server has kept is weights, update or protocol: none is the picture."""
    for path in list_observations(small_run.observations):
        truth = Vault(small_run.vault).read(*address_of(path))
        pixels = truth.images.flatten()
        normalised = (pixels - 0.5) / 0.5
        for file in (path.with_suffix(".safetensors"), path.parent / "weights.safetensors"):
            content = file.read_bytes()
            for row in (pixels, normalised):
                for at in range(0, len(row) - 8, 97):
                    assert row[at : at + 8].numpy().tobytes() not in content
                assert row.to(torch.uint8).numpy().tobytes() not in content
            for tensor in load_file(file).values():
                assert tensor.dtype != torch.int64, "labels would be whole numbers"
        about = json.loads(path.read_text())
        assert set(about) == {
            *("format", "round", "client", "kind", "num_examples", "loss", "finite"),
            *("architecture", "num_classes", "image_size", "batch_size", "local_steps"),
            *("local_epochs", "protocol", "defenses", "checksum"),
        }


@pytest.mark.parametrize("damage", ["truncate", "flip", "json", "missing", "weights"])
def test_a_damaged_observation_is_an_error_not_a_wrong_number(
    small_run: Run, tmp_path: Path, damage: str
) -> None:
    import shutil

    shutil.copytree(small_run.observations, tmp_path / "o")
    path = list_observations(tmp_path / "o")[0]
    tensors = path.with_suffix(".safetensors")
    content = tensors.read_bytes()
    if damage == "truncate":
        tensors.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        tensors.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "json":
        path.write_text("{")
    elif damage == "missing":
        tensors.unlink()
    else:
        (path.parent / "weights.safetensors").write_bytes(b"nothing")
    with pytest.raises(ObservationError):
        read_observation(path)


@pytest.mark.parametrize("field", READERS)
def test_every_field_that_is_granted_has_a_reader(small_run: Run, field: str) -> None:
    generous = view(
        small_run,
        "E",
        granted=frozenset(FIELDS),
        secrets=Secrets(torch.tensor([1]), {}),
        assets=Assets(torch.ones(1), lambda: None, torch.nn.Identity),
        traffic=lambda: Traffic((), lambda round_, client: None),
    )
    value = getattr(generous, READERS[field])
    if callable(value) and not isinstance(value, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # the stand-in has no such weights
            value()
    assert field in generous.ledger


def test_what_has_no_reader_is_granted_to_nobody() -> None:
    for letter in THREATS:
        assert granted_by(ThreatSpec(model=letter)) <= READERS.keys()
    assert FIELDS.keys() - READERS.keys() == {"tampering", "client_choice", "label_distribution"}


@pytest.mark.parametrize("letter", THREATS)
def test_a_threat_that_no_attack_can_play_is_refused_with_a_sentence(letter: str) -> None:
    if letter in "ABCDE":
        assert refuse_unplayed(ThreatSpec(model=letter)) is None
    else:
        with pytest.raises(SpecError, match=f"threat {letter} .* cannot be audited yet"):
            refuse_unplayed(ThreatSpec(model=letter))
