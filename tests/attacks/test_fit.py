"""Fit: what a reconstruction explains of an update, without the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.attacks.fit import fit_of
from fedsim.audit.stages import federate
from fedsim.campaign.jobs import Handout, _view
from fedsim.core.attack import EXACT, Fit, Reconstruction
from fedsim.core.knowledge import Desk, View
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.core.vault import Vault
from tests.conftest import small_spec

CPU = torch.device("cpu")


def _seen(tmp_path: Path, *overrides: str) -> tuple[View, Tensor, Tensor]:
    """A view of the first update, and the pictures behind it."""
    spec = small_spec("train.rounds=1", *overrides)
    run = federate(spec, tmp_path / "run")
    path = list_observations(run.observations)[0]
    observation = read_observation(path)
    truth = Vault(Run(run.root).vault).read(1, observation.client)
    view = _view(observation, Handout(spec.threat, spec.seed, "cpu"), Desk())
    return view, truth.images, truth.labels


@pytest.mark.parametrize(
    "protocol",
    [
        "train.batch_size=2",
        "train={rounds: 1, clients_per_round: 2, batch_size: 2, upload: delta, local_steps: 2}",
        "defenses=[{name: clipping, norm: 0.1}]",
        "model={name: convnet}",
    ],
)
def test_the_true_pictures_are_exact_and_others_are_not(tmp_path: Path, protocol: str) -> None:
    view, images, labels = _seen(tmp_path, "train.evaluate=false", protocol)
    found = fit_of(view, Reconstruction(images, labels), CPU)
    assert found is not None
    assert found.worst < EXACT
    assert found.is_exact
    faint = (images + 0.02 * torch.randn(images.shape)).clamp(0, 1)
    near = fit_of(view, Reconstruction(faint, labels), CPU)
    grey = fit_of(view, Reconstruction(torch.full_like(images, 0.5), labels), CPU)
    assert near is not None
    assert grey is not None
    assert not near.is_exact
    assert found.distance < near.distance < grey.distance


def test_a_part_of_the_batch_is_never_exact(tmp_path: Path) -> None:
    view, images, labels = _seen(tmp_path, "train.batch_size=2")
    found = fit_of(view, Reconstruction(images[:1], labels), CPU)
    assert found is not None
    assert not found.complete
    assert not found.is_exact


@pytest.mark.parametrize(
    "little", ["train.trainable=head", "defenses=[{name: top_k, sparsity: 0.9999}]"]
)
def test_an_update_that_says_little_proves_nothing(tmp_path: Path, little: str) -> None:
    """Other pictures with the same features, or with the same few signs, explain it as well."""
    view, images, labels = _seen(tmp_path, little)
    found = fit_of(view, Reconstruction(images, labels), CPU)
    assert found is not None
    assert found.worst < EXACT
    assert not found.is_exact


@pytest.mark.parametrize("wrong", [-1, 10_000])
def test_labels_that_name_no_class_do_not_cost_the_result(tmp_path: Path, wrong: int) -> None:
    view, images, labels = _seen(tmp_path)
    found = fit_of(view, Reconstruction(images, torch.full_like(labels, wrong)), CPU)
    assert found is not None
    assert found.is_exact


def test_what_was_uploaded_under_noise_is_never_explained_in_full(tmp_path: Path) -> None:
    noise = "defenses=[{name: gaussian_noise, std: 0.1, relative: true}]"
    view, images, labels = _seen(tmp_path, noise)
    found = fit_of(view, Reconstruction(images, labels), CPU)
    assert found is not None
    assert not found.is_exact
    assert found.distance < 0.5


def test_a_result_without_pictures_has_no_fit(tmp_path: Path) -> None:
    view, images, _ = _seen(tmp_path)
    nothing = Reconstruction(images[:0], features=torch.zeros(1, 4))
    assert fit_of(view, nothing, CPU) is None


def test_a_fit_is_kept_with_a_result(tmp_path: Path) -> None:
    fit = Fit(0.25, 0.5, complete=True)
    path = tmp_path / "result.safetensors"
    Reconstruction(torch.zeros(1, 3, 8, 8), fit=fit).save(path)
    assert Reconstruction.load(path).fit == fit
