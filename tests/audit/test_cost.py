"""What one upload takes, as tightly as the defenses can write it."""

from __future__ import annotations

from pathlib import Path

from fedsim.audit.cost import upload_bytes
from fedsim.audit.stages import federate
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from tests.planted import tiny_spec


def test_an_upload_takes_what_its_numbers_take_where_no_defense_packs_it(small_run: Run) -> None:
    update = read_observation(list_observations(small_run.observations)[-1]).update
    assert upload_bytes(small_run) == update.nbytes()


def test_a_sparse_upload_takes_less_and_none_takes_nothing(small_run: Run, tmp_path: Path) -> None:
    sparse = tiny_spec().model_dump(mode="json")
    sparse["defenses"] = [{"name": "top_k", "sparsity": 0.95}]
    run = federate(type(tiny_spec()).model_validate(sparse), tmp_path / "run")
    plain = read_observation(list_observations(run.observations)[-1]).update.nbytes()
    assert (upload_bytes(run) or plain) < 0.2 * plain
    assert upload_bytes(Run(tmp_path / "empty")) is None
