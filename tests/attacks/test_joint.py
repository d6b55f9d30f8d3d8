"""Joint inversion: several updates, one set of pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.attacks.joint import JointMatcher, share_images
from fedsim.attacks.matching.matcher import Match
from fedsim.core.attack import no_progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Traffic, View
from fedsim.core.metrics import psnr
from fedsim.core.observation import Observation
from fedsim.core.spec import ModelSpec
from tests.attacks.conftest import view_of
from tests.staging import CPU, convnet, observe_net, photos


def test_images_are_shared_by_their_labels() -> None:
    rows, classes = share_images([[1, 4], [4, 4, 2], [1, 2]])
    assert classes == [1, 4, 4, 2]
    assert rows == [[0, 1], [1, 2, 3], [0, 3]]


def test_a_joint_loss_is_the_mean_of_its_parts() -> None:
    class Pull:
        def __init__(self, target: float):
            self.target, self.notes = target, list[str]()

        def __call__(self, images, labels):
            apart = images - self.target
            return Match(apart.square().flatten(1).sum(1), 2 * apart, None)

        def state(self):
            return {"target": self.target}

        def restore(self, state):
            self.target = state["target"]

    matcher = JointMatcher([Pull(0.0), Pull(1.0)], [[0, 1], [1]])
    images = torch.full((2, 2, 3, 2, 2), 0.5)
    match = matcher(images, torch.zeros(2, 2, dtype=torch.long))
    assert torch.allclose(match.value, torch.full((2,), (0.25 * 24 + 0.25 * 12) / 2))
    assert torch.allclose(match.images[:, 0], torch.full((2, 3, 2, 2), 0.5))
    assert torch.allclose(match.images[:, 1], torch.zeros(2, 3, 2, 2))
    matcher.restore({"0.target": 3.0, "1.target": 4.0})
    assert matcher.state() == {"0.target": 3.0, "1.target": 4.0}


def rounds_of_one_client(count: int) -> tuple[dict[tuple[int, int], Observation], torch.Tensor]:
    """The same two pictures behind every round, under fresh weights each time."""
    images, _ = photos(16, [70, 20])
    labels = torch.tensor([1, 5])
    found = {}
    for round_ in range(1, count + 1):
        torch.manual_seed(round_)
        net = convnet()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        observation = observe_net(net, ModelSpec(), images, labels)
        public = replace(observation.public, batch_size=2)
        found[round_, 0] = replace(observation, round=round_, public=public)
    return found, images


def test_more_rounds_of_the_same_pictures_show_more() -> None:
    observations, images = rounds_of_one_client(4)

    def open_(round_: int, client: int) -> View:
        return view_of(observations[round_, client], "C")

    view = view_of(observations[4, 0], "C", traffic=lambda: Traffic(tuple(observations), open_))
    results = [
        create_attack("joint", rounds=n, steps=200, tv=1e-3).reconstruct(
            view, device=CPU, progress=no_progress
        )
        for n in (1, 4)
    ]
    one, four = (float(psnr(images, r.images).mean()) for r in results)
    assert four > one + 2
    assert any("4 updates of client 0, 2 images" in note for note in results[1].notes)


def test_joint_inversion_needs_labels() -> None:
    observations, _ = rounds_of_one_client(1)
    view = view_of(observations[1, 0], "C", traffic=lambda: Traffic((), lambda r, c: None))
    with pytest.raises(AttackError, match="tells images apart by their labels"):
        create_attack("joint", labels="joint").reconstruct(view, device=CPU, progress=no_progress)
