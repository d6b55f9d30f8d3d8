"""Watch: guards look, are recorded, and leave no trace on the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.audit.stages import federate
from fedsim.core.observation import read_observation
from fedsim.core.run import list_observations
from fedsim.core.vault import Vault
from tests.conftest import small_spec

GUARD = "tests.servers:Suspicious"


def guarded(*more: str, score: float = 1.0, refuse: bool = False) -> list[str]:
    about = f"{{name: '{GUARD}', score: {score}, refuse: {str(refuse).lower()}}}"
    return ["train.clients_per_round=null", "data.clients=2", f"guards=[{about}]", *more]


def test_a_guard_that_warns_changes_nothing_but_the_record(tmp_path: Path) -> None:
    plain = federate(small_spec(*guarded()[:2]), tmp_path / "plain")
    watched = federate(small_spec(*guarded()), tmp_path / "watched")
    for one, two in zip(
        *(list_observations(run.observations) for run in (plain, watched)), strict=True
    ):
        ours, theirs = (read_observation(path).update.tensors for path in (one, two))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    (finding,) = Vault(watched.vault).read(1, 0).findings
    assert (finding["fired"], finding["refused"]) == (True, False)
    assert Vault(plain.vault).read(1, 0).findings == []


def test_a_guard_remembers_the_last_round_of_its_own_client(tmp_path: Path) -> None:
    run = federate(small_spec(*guarded(score=0.0)), tmp_path / "run")
    first, second = (Vault(run.vault).read(round_, 1).findings[0] for round_ in (1, 2))
    assert (first["words"], first["fired"]) == ("never met", False)
    norm = float(
        read_observation(list_observations(run.observations)[1]).weights["head.weight"].norm()
    )
    assert second["words"] == f"was {norm:.3f}"


def test_a_guard_that_refuses_keeps_its_client_from_uploading(tmp_path: Path) -> None:
    spec = small_spec(*guarded(refuse=True), "train.rounds=1")
    run = federate(spec, tmp_path / "run")
    assert not list_observations(run.observations)
    told = {event["kind"]: event["message"] for event in run.events()}
    assert told["client_refused"].endswith("did not upload: suspicious: never met")
    (finding,) = Vault(run.vault).read(1, 0).findings
    assert finding["refused"]
    assert Vault(run.vault).read(1, 0).update == ""


def compared(root: Path, *more: str) -> list[dict]:
    """What `same_model` found in every client of a round."""
    spec = small_spec("train.clients_per_round=3", "train.rounds=1", *more)
    run = federate(spec, root)
    return [
        finding
        for client in spec.cohort(1)
        for finding in Vault(run.vault).read(1, client).findings
        if finding["guard"] == "same_model"
    ]


@pytest.mark.parametrize("model", ["", "model={name: resnet10t}"])
def test_clients_who_were_sent_the_same_say_so(model: str, tmp_path: Path) -> None:
    local = ["train.batchnorm=local", "train.mode=eval", model] if model else []
    found = compared(tmp_path / "run", "guards=[{name: same_model}]", *local)
    assert [finding["fired"] for finding in found] == [False] * 3
    assert found[0]["words"] == "others of the cohort received the same (2 of 2)"


def test_clients_who_were_sent_different_weights_find_out_before_they_upload(
    tmp_path: Path,
) -> None:
    server = ["threat=F", "server.manoeuvre={name: 'tests.servers:OwnHead'}"]
    found = compared(tmp_path / "run", "guards=[{name: same_model}]", *server)
    assert [finding["fired"] for finding in found] == [True] * 3
    assert found[0]["words"].startswith("2 of 2 others received something else")
    alike = ["threat=F", "server.manoeuvre={name: 'tests.servers:SameHead'}"]
    found = compared(tmp_path / "alike", "guards=[{name: same_model}]", *alike)
    assert [finding["fired"] for finding in found] == [False] * 3, "that is for other guards"
