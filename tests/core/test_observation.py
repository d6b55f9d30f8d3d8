"""Observations: nothing of a picture in them, and damage is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.core.errors import ForeignObservationError, ObservationError
from fedsim.core.files import read_json, write_json
from fedsim.core.learning import Update
from fedsim.core.observation import (
    Public,
    read_observation,
    read_update,
    recorded_checksum,
    recorded_classes,
    recorded_pictures,
    refuse_foreign,
    update_checksum,
    write_observation,
    write_weights,
)
from fedsim.core.run import Run, address_of, list_observations, observation_path
from fedsim.core.spec import Component, Spec, Upload
from fedsim.core.vault import Vault


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
            *("local_epochs", "protocol", "defenses", "checksum", "seal"),
        }


@pytest.mark.parametrize("damage", ["truncate", "flip", "json", "said", "missing", "weights"])
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
    elif damage == "said":  # what a client says of its upload has no other checksum
        said = path.read_bytes()
        assert b'"num_examples": 1' in said
        path.write_bytes(said.replace(b'"num_examples": 1', b'"num_examples": 3'))
    elif damage == "missing":
        tensors.unlink()
    else:
        (path.parent / "weights.safetensors").write_bytes(b"nothing")
    with pytest.raises(ObservationError):
        read_observation(path)


def test_an_update_is_read_whatever_its_client_says_of_it(tmp_path: Path) -> None:
    sent = Update(Upload.DELTA, {"w": torch.ones(2)}, {"b": torch.zeros(1)}, num_examples=-1)
    write_observation(tmp_path, 1, 0, sent, Public.of(Spec(), num_classes=8))
    found = read_update(observation_path(tmp_path, 1, 0))
    assert found.kind is Upload.DELTA
    assert torch.equal(found.tensors["w"], torch.ones(2))
    assert torch.equal(found.buffers["b"], torch.zeros(1))


def test_an_observation_is_read_by_its_bare_name_beside_its_weights(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = list_observations(small_run.observations)[0]
    expected = read_observation(path)
    monkeypatch.chdir(path.parent)
    found = read_observation(Path(path.name))
    assert found.checksum == expected.checksum
    assert found.weights.keys() == expected.weights.keys()


@pytest.mark.parametrize(
    ("train", "examples", "most"),
    [
        ({"batch_size": 4}, 400, 4),
        ({"batch_size": 4, "upload": "delta"}, 400, 4),
        ({"batch_size": 4, "upload": "delta", "local_steps": 3}, 400, 12),
        ({"batch_size": 4, "upload": "delta", "local_epochs": 2}, 36, 18),
        ({"batch_size": 4, "upload": "delta", "local_epochs": 2}, 1, 4),
        ({"batch_size": 4, "accumulate": 3}, 400, 12),
        (
            {
                "batch_size": 4,
                "upload": "delta",
                "local_epochs": 2,
                "augment": [{"name": "RandomHorizontalFlip"}],
            },
            *(36, 36),  # each epoch shows them anew
        ),
    ],
)
def test_what_is_public_bounds_the_pictures_behind_an_update(
    tmp_path: Path, train: dict, examples: int, most: int
) -> None:
    public = Public.of(Spec.model_validate({"train": train}), num_classes=8)
    update = Update(public.protocol.upload, {"a": torch.ones(2)}, num_examples=examples)
    write_weights(tmp_path, 1, {"a": torch.zeros(2)})
    write_observation(tmp_path, 1, 0, update, public)
    path = observation_path(tmp_path, 1, 0).with_suffix(".json")
    assert read_observation(path).pictures == recorded_pictures(path) == most
    assert recorded_classes(path) == 8
    path.write_text("{}")
    assert recorded_pictures(path) is None
    assert recorded_classes(path) is None


OTHERS: dict[str, dict] = {
    "batch_size": {"batch_size": 64},
    "local_steps": {"local_steps": 2},
    "image_size": {"image_size": 64},
    "num_classes": {"num_classes": 9},
    "defenses": {"defenses": [{"name": "gaussian_noise", "std": 0.1}]},
    "protocol": {"protocol": {"lr": 0.1}},
    "architecture": {"architecture": {"name": "resnet18"}},
}


@pytest.mark.parametrize("part", OTHERS)
def test_an_observation_announces_what_the_spec_of_its_run_does(part: str, tmp_path: Path) -> None:
    spec = Spec.model_validate({"defenses": [], "model": {"options": {"depth": 2}}})
    update = Update(Upload.GRADIENT, {"a": torch.ones(2)}, num_examples=1)
    write_observation(tmp_path, 1, 0, update, Public.of(spec, num_classes=8))
    path = observation_path(tmp_path, 1, 0).with_suffix(".json")
    refuse_foreign(path, spec, 8)
    write_json(path, read_json(path) | OTHERS[part])
    with pytest.raises(ForeignObservationError, match=f"is not of this run: its {part} is"):
        refuse_foreign(path, spec, 8)


def test_what_an_older_version_did_not_announce_is_no_difference(tmp_path: Path) -> None:
    spec = Spec.model_validate({"model": {"checkpoint": "/here/model.safetensors"}})
    spec = spec.model_copy(update={"defenses": [Component(name="dpsgd", title="Ours", noise=1.0)]})
    update = Update(Upload.GRADIENT, {"a": torch.ones(2)}, num_examples=1)
    write_observation(tmp_path, 1, 0, update, Public.of(spec, num_classes=8))
    path = observation_path(tmp_path, 1, 0).with_suffix(".json")
    about = read_json(path)
    del about["protocol"]["batchnorm"], about["architecture"]["pretrained"]
    for key in ("betas", "schedule", "proximal", "micro", "loss", "augment", "precision"):
        del about["protocol"][key]
    del about["protocol"]["upload_dtype"]
    about["architecture"]["checkpoint"] = "model.safetensors"
    del about["defenses"][0]["title"]
    write_json(path, about)
    refuse_foreign(path, spec)
    with pytest.raises(ForeignObservationError, match="its num_classes is 8, not 9"):
        refuse_foreign(path, spec, 9)
    path.write_text("{")  # for whoever reads it to tell
    refuse_foreign(path, spec, 9)
    path.unlink()
    refuse_foreign(path, spec, 9)


def test_a_client_knows_the_checksum_that_its_update_is_kept_under(tmp_path: Path) -> None:
    tensors, buffers = {"a": torch.ones(2)}, {"norm.running_mean": torch.rand(3)}
    update = Update(Upload.GRADIENT, tensors, buffers, num_examples=1)
    write_observation(tmp_path, 1, 0, update, Public.of(Spec(), num_classes=8))
    path = observation_path(tmp_path, 1, 0).with_suffix(".json")
    assert recorded_checksum(path) == update_checksum(update)
    for other in (
        replace(update, buffers={}),
        replace(update, buffers={"norm.running_mean": torch.zeros(3)}),
        replace(update, tensors={"a": torch.zeros(2)}),
    ):
        assert update_checksum(other) != update_checksum(update)


def test_how_people_train_is_announced_and_read_back(tmp_path: Path) -> None:
    train = {
        "loss": {"label_smoothing": 0.1, "weights": [1.0, 2.0]},
        "augment": [{"name": "RandomResizedCrop", "scale": [0.5, 1]}, {"name": "MixUp"}],
        "schedule": {"name": "one_cycle"},
        "round_schedule": {"name": "cosine"},
        "precision": "bfloat16",
        "upload_dtype": "float16",
        "rounds": 2,
        "upload": "delta",
        "optimizer": "adam",
    }
    spec = Spec.model_validate({"train": train})
    public = Public.of(spec, num_classes=2, round_=2)
    assert public.protocol.lr == pytest.approx(spec.train.lr / 2)
    update = Update(Upload.DELTA, {"a": torch.ones(2, dtype=torch.bfloat16)}, num_examples=1)
    write_weights(tmp_path, 2, {"a": torch.zeros(2)})
    write_observation(tmp_path, 2, 0, update, public)
    path = observation_path(tmp_path, 2, 0)
    found = read_observation(path)
    assert found.public == public
    assert found.update.tensors["a"].dtype == torch.bfloat16
    refuse_foreign(path.with_suffix(".json"), spec, 2)
