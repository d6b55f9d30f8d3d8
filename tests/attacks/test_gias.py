"""GIAS: searching the latents and the weights of a generator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.attacks.generators import generate
from fedsim.attacks.gias import Gias
from fedsim.campaign.plan import prepare
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import NotGranted
from fedsim.core.metrics import psnr
from fedsim.core.notebook import Notebook
from fedsim.core.observation import Observation
from tests.attacks.conftest import GENERATOR, Basis, view_of
from tests.conftest import small_spec
from tests.staging import CPU, convnet_observation


def gias(observation: Observation, generator=None, **params) -> Reconstruction:
    view = view_of(observation, generator=generator)
    attack = create_attack("gias", **params)
    result = attack.reconstruct(view, device=CPU, progress=no_progress)
    assert set(view.ledger) <= attack.needs | Gias.uses
    return result


def test_latents_of_a_good_generator_find_the_picture() -> None:
    observation, images = convnet_observation()
    found = gias(observation, Basis, space="z", steps=300, seeds=8, lr_z=0.1)
    guess = generate(Basis(), torch.zeros(1, 6)).detach()
    assert float(psnr(images, found.images)) > float(psnr(images, guess)) + 30


def test_refining_continues_from_the_latents() -> None:
    observation, images = convnet_observation()
    alone = gias(observation, Basis, space="z", steps=30, seeds=2, lr_z=0.1)
    refined = gias(
        observation, Basis, space="z/x", steps=30, refine=200, seeds=2, lr_z=0.1, lr=0.02
    )
    adapted = gias(
        observation, Basis, space="z/w", steps=30, refine=100, seeds=2, lr_z=0.1, lr_w=0.01
    )
    assert refined.loss < alone.loss
    assert adapted.loss < alone.loss
    assert float(psnr(images, refined.images)) > float(psnr(images, alone.images))
    assert [step for step, _ in refined.trace][-1] == 230


def test_an_untrained_generator_is_a_prior_of_its_own() -> None:
    observation, images = convnet_observation()
    found = gias(observation, space="w", steps=150, seeds=1, lr_w=0.01, options=GENERATOR)
    assert float(psnr(images, found.images)) > 12
    assert "generator" not in found.ledger


def test_a_trained_generator_must_be_granted() -> None:
    observation, _ = convnet_observation()
    with pytest.raises(NotGranted, match="generator"):
        gias(observation, None, space="z", steps=2)
    assert "generator" in create_attack("gias", space="z/w").needs
    assert "generator" not in create_attack("gias", space="w").needs
    assert "generator" not in create_attack("gias", space="x").needs
    spec = small_spec("attacks=[{name: gias}]")
    with pytest.raises(NotGranted, match=r"'gias' needs generator.*threat D does"):
        prepare(spec)


def test_an_attack_goes_on_after_the_stage_that_was_done(tmp_path: Path) -> None:
    observation, _ = convnet_observation()
    attack = create_attack("gias", space="z/x", steps=20, refine=20, seeds=2, checkpoint_seconds=0)
    whole = attack.reconstruct(
        view_of(observation, generator=Basis), device=CPU, progress=no_progress
    )
    seen: list[int] = []

    def cut(done: int, total: int, loss: float | None = None) -> None:
        if done > 30:
            raise KeyboardInterrupt

    def watch(done: int, total: int, loss: float | None = None) -> None:
        seen.append(done)

    notebook = Notebook(tmp_path / "page.safetensors")
    with pytest.raises(KeyboardInterrupt):
        attack.reconstruct(
            view_of(observation, "D", notebook, generator=Basis), device=CPU, progress=cut
        )
    again = attack.reconstruct(
        view_of(observation, "D", notebook, generator=Basis), device=CPU, progress=watch
    )
    assert min(seen) > 30
    assert torch.equal(whole.images, again.images)
    assert list(tmp_path.iterdir()) == []
