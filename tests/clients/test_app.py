"""A client: trains on its own pictures, evaluates its part of the test set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.audit.stages import federate
from fedsim.campaign.plan import prepare
from fedsim.clients.app import ClientSide, evaluate_client, train_client
from fedsim.core.observation import read_observation, recorded_checksum
from fedsim.core.run import address_of, list_observations
from fedsim.core.vault import Vault
from fedsim.core.wire import Share
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
