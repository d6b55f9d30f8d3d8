"""Watch: guards look, are recorded, and leave no trace on the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.audit.stages import federate
from fedsim.core.errors import RunError
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
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
    with pytest.raises(RunError, match="no update was observed"):
        federate(spec, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert not list_observations(run.observations)
    told = {event["kind"]: event["message"] for event in run.events()}
    assert told["client_refused"].endswith("did not upload: suspicious: never met")
    (finding,) = Vault(run.vault).read(1, 0).findings
    assert finding["refused"]
    assert Vault(run.vault).read(1, 0).update == ""
