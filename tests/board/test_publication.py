"""What a run's owner hands out: what the server saw, and nothing of the truth or the owner."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from fedsim.audit.replay import attack_offline
from fedsim.audit.stages import audit
from fedsim.board import publish
from fedsim.core.errors import RunError
from fedsim.core.files import (
    checksum,
    read_json,
    read_tensors,
    save_tensors,
    tensors_from_bytes,
    write_json,
)
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Component
from tests.board.conftest import images_of
from tests.conftest import small_spec

SECRETS = ("vault", "reconstructions", "learned", "submissions", "offline", "spool", "capture")


def test_only_observations_and_what_is_public_are_written(measured: Run, tmp_path: Path) -> None:
    done = publish(measured, tmp_path / "out")
    names = {str(path.relative_to(done.root)) for path in done.root.rglob("*") if path.is_file()}
    seen = {
        str(path.relative_to(measured.root))
        for path in measured.observations.rglob("*")
        if path.is_file()
    }
    assert names == seen | {"federation.yaml", "export.json"}
    assert done.observations == len(list_observations(measured.observations))


def test_nothing_of_the_vault_is_in_it(measured: Run, tmp_path: Path) -> None:
    done = publish(measured, tmp_path / "out")
    private = [one.numpy().tobytes() for one in images_of(measured).values()]
    for path in measured.vault.rglob("*"):
        if path.is_file():
            private.append(path.read_bytes())
    for path in done.root.rglob("*"):
        if not path.is_file():
            continue
        content = path.read_bytes()
        assert not any(secret in content for secret in private), path
        if path.suffix == ".safetensors":
            tensors, about = tensors_from_bytes(content, path)
            assert not about
            assert all(
                len(tensor.shape) < 4 or tensor.shape[-1] != 32 for tensor in tensors.values()
            )
        else:
            assert str(measured.root) not in content.decode()
            keys = _keys(json.loads(content) if path.suffix == ".json" else yaml.safe_load(content))
            assert not keys & {
                "seed",
                "label",
                "labels",
                "path",
                "checkpoint",
                "memory",
                "partition",
            }


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in _keys(inner)}
    if isinstance(value, list):
        return {key for inner in value for key in _keys(inner)}
    return set()


def test_what_somebody_laid_beside_the_observations_does_not_travel(
    measured: Run, tmp_path: Path
) -> None:
    for name in SECRETS:
        (measured.root / name).mkdir(exist_ok=True)
        (measured.root / name / "note.txt").write_text("a secret")
    folder = measured.observations / "round-0001"
    shutil.copy(next(measured.vault.glob("round-*/*.safetensors")), folder / "truth.safetensors")
    (folder / "notes.txt").write_text("a secret")
    path = list_observations(measured.observations)[0]
    write_json(path, {**read_json(path), "remark": "a secret", "labels": [1]})
    done = publish(measured, tmp_path / "out")
    for file in done.root.rglob("*"):
        assert file.is_dir() or b"a secret" not in file.read_bytes()
        assert file.name not in ("truth.safetensors", "notes.txt")


def test_an_observation_that_holds_more_than_an_update_is_refused(
    measured: Run, tmp_path: Path
) -> None:
    path = list_observations(measured.observations)[0]
    tensors, _ = read_tensors(path.with_suffix(".safetensors"))
    tensors["images"] = torch.zeros(1, 3, 32, 32)
    save_tensors(path.with_suffix(".safetensors"), tensors)
    write_json(path, {**read_json(path), "checksum": checksum(tensors)})
    with pytest.raises(RunError, match="holds more than an update"):
        publish(measured, tmp_path / "out")


def test_what_is_published_can_be_attacked_and_is_what_the_server_saw(
    measured: Run, tmp_path: Path
) -> None:
    done = publish(measured, tmp_path / "out")
    for path in list_observations(measured.observations):
        here = read_observation(done.root / path.relative_to(measured.root))
        there = read_observation(path)
        assert here.checksum == there.checksum
        assert all(torch.equal(here.weights[name], there.weights[name]) for name in there.weights)
    source = done.root / "observations"
    rows = attack_offline(source, Component(name="patch_solve"), tmp_path / "mine", "C", 1)
    assert rows
    assert {(row["failure"], row["unscored"]) for row in rows} == {(None, "no vault")}


def test_weights_that_some_were_sent_go_with_them(tmp_path: Path) -> None:
    spec = small_spec(
        *("threat=F", "server.manoeuvre.name=fishing", "train.rounds=1", "train.batch_size=2"),
        *("data.clients=2", "audit.gallery=0", "attacks=[{name: patch_solve}]"),
    )
    run = audit(spec, tmp_path / "run", willing=True)
    done = publish(run, tmp_path / "out")
    for path in list_observations(run.observations):
        here = read_observation(done.root / path.relative_to(run.root))
        there = read_observation(path)
        assert here.chosen == there.chosen
        assert all(torch.equal(here.weights[name], there.weights[name]) for name in there.weights)


def test_an_owner_is_told_what_can_be_guessed(measured: Run, tmp_path: Path) -> None:
    notes = publish(measured, tmp_path / "out").notes
    assert any("can be guessed" in note for note in notes)
    assert any("are public" in note for note in notes)


def test_it_is_written_into_a_directory_of_its_own(measured: Run, tmp_path: Path) -> None:
    for place in (measured.root, measured.root / "inside", tmp_path):
        with pytest.raises(RunError, match="where the run lies"):
            publish(measured, place)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(RunError, match="holds something else"):
        publish(measured, tmp_path / "out")
