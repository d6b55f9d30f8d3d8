"""A client: trains on its own pictures, evaluates its part of the test set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.audit.stages import federate
from fedsim.campaign.plan import prepare
from fedsim.clients.app import ClientSide, DeployedSide, evaluate_client, train_client
from fedsim.core.errors import VaultError
from fedsim.core.observation import Observation, Public, read_observation, recorded_checksum
from fedsim.core.run import address_of, list_observations
from fedsim.core.vault import Vault
from fedsim.core.wire import Share
from fedsim.scoring.canary import canary
from tests.clients.conftest import dealt, without_data
from tests.conftest import small_spec


def test_a_client_trains_and_evaluates_without_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec("train.evaluate=true", "defenses=[{name: gaussian_noise, std: 0.001}]")
    weights = prepare(spec).initial
    whole = ClientSide(spec, tmp_path / "whole")
    update = train_client(whole, 1, 2, weights)
    tested = evaluate_client(whole, 1, 2, weights, Share(1, 3))
    folder = dealt(spec, tmp_path / "dealt")[2]
    without_data(monkeypatch)
    own = ClientSide(spec, tmp_path / "own", folder)
    again = train_client(own, 1, 2, weights)
    assert all(torch.equal(again.tensors[name], update.tensors[name]) for name in update.tensors)
    assert evaluate_client(own, 1, 2, weights, Share(1, 3)) == tested
    assert torch.equal(Vault(own.vault).read(1, 2).images, Vault(whole.vault).read(1, 2).images)


def test_test_accuracy_covers_the_test_set_exactly_once(tmp_path: Path) -> None:
    one = federate(small_spec("train={rounds: 1, clients_per_round: 1}"), tmp_path / "one")
    # Before any training moved the model apart, the split over clients must not matter:
    # compare the evaluation of the same weights by one client and by three.
    from fedsim.clients.app import evaluate_client

    side = ClientSide(one.spec, one.vault)
    weights = load_file(one.checkpoint)
    whole = evaluate_client(side, 1, 0, weights, Share(0, 1))
    parts = [evaluate_client(side, 1, client, weights, Share(client, 3)) for client in range(3)]
    right = sum(part.accuracy * part.examples for part in parts)
    assert sum(part.examples for part in parts) == whole.examples
    assert right / whole.examples == pytest.approx(whole.accuracy)
    assert one.rounds["test_accuracy"][0] == pytest.approx(whole.accuracy)


def test_a_truth_names_the_update_that_was_sent(tmp_path: Path) -> None:
    small = "{layers: [1, 1, 1, 1], channels: [8, 8, 8, 8]}"
    train = "train={rounds: 1, clients_per_round: 2, batch_size: 2, evaluate: false}"
    spec = small_spec(f"model={{name: resnet18, options: {small}}}", train)
    run = federate(spec, tmp_path / "run")
    for path in list_observations(run.observations):
        round_, client = address_of(path)
        truth = Vault(run.vault).read(round_, client, recorded_checksum(path))
        assert truth.update == recorded_checksum(path)
        assert read_observation(path).update.buffers


NOISY = ("train.batch_size=2", "defenses=[{name: gaussian_noise, std: 0.001}]")


def test_a_simulated_client_does_the_same_again(tmp_path: Path) -> None:
    spec = small_spec(*NOISY)
    weights = prepare(spec).initial
    sides = [ClientSide(spec, tmp_path / name) for name in ("first", "second")]
    first, second = (train_client(side, 1, 2, weights) for side in sides)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    truths = [side.opened().read(1, 2) for side in sides]
    assert truths[0].defense_seed == truths[1].defense_seed < 2**48


def test_a_client_on_a_machine_of_its_own_draws_what_the_spec_does_not_tell(
    tmp_path: Path,
) -> None:
    spec = small_spec(*NOISY)
    weights, folder = prepare(spec).initial, dealt(spec, tmp_path / "dealt")[2]
    sides = [
        DeployedSide(spec, tmp_path / name / "vault", folder, keys=tmp_path / name / "keys")
        for name in ("first", "second")
    ]
    simulated = ClientSide(spec, tmp_path / "simulated")
    train_client(simulated, 1, 2, weights)
    updates = [train_client(side, 1, 2, weights) for side in sides]
    updates += [train_client(sides[0], 2, 2, weights)]
    truths = [sides[0].opened().read(1, 2), sides[1].opened().read(1, 2)]
    truths += [sides[0].opened().read(2, 2), simulated.opened().read(1, 2)]
    assert len({truth.defense_seed for truth in truths}) == 4
    assert min(truth.defense_seed for truth in truths[:3]) >= 2**63
    pictures = {truth.images.numpy().tobytes() for truth in truths}
    assert len(pictures) > 1, "the batches are the client's own draw as well"
    known = Public.of(spec, 8)
    for update, truth, round_ in zip(updates, truths[:3], (1, 1, 2), strict=True):
        seen = Observation(round_, 2, weights, update, known)
        assert canary(seen, truth, torch.device("cpu")) < 1e-5
        guessed = replace(truth, defense_seed=simulated.secret(round_, 2))
        assert canary(seen, guessed, torch.device("cpu")) > 1e-3, "what a server could guess"


def test_the_key_of_a_client_elsewhere_is_where_it_says_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec()
    monkeypatch.setenv("FEDSIM_VAULT_KEYS", str(tmp_path / "users"))
    side = DeployedSide(spec, tmp_path / "vault", keys=tmp_path / "own")
    train_client(side, 1, 2, prepare(spec).initial)
    assert [file.suffix for file in (tmp_path / "own").iterdir()] == [".key"]
    assert not (tmp_path / "users").exists()
    with pytest.raises(VaultError):
        Vault(side.vault).read(1, 2)
    assert side.opened().read(1, 2).images.shape == (1, 3, 32, 32)
