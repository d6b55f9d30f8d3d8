"""The interface of guards: a finding fires above its limit, a scene shows what was received."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedsim.core.guard import Finding, Guard, Scene
from fedsim.core.learning import Protocol


class Silent(Guard):
    def inspect(self, scene: Scene) -> Finding:
        return Finding("silent", 0.0, 1.0, "nothing")


def scene(model: nn.Module) -> Scene:
    batch = (torch.rand(2, 3, 4, 4), torch.tensor([0, 1]))
    return Scene(1, 0, model, [batch], Protocol())


@pytest.mark.parametrize(
    ("score", "fired"),
    [(0.0, False), (1.0, False), (1.001, True), (math.inf, True), (math.nan, True)],
)
def test_a_finding_fires_above_its_limit_and_where_the_score_is_no_number(
    score: float, fired: bool
) -> None:
    assert Finding("some", score, 1.0, "words").fired is fired


def test_a_finding_is_written_with_whether_it_fired() -> None:
    plain = Finding("some", 2.0, 1.0, "words", refused=True).plain()
    assert plain == {
        "guard": "some",
        "score": 2.0,
        "limit": 1.0,
        "words": "words",
        "fired": True,
        "refused": True,
    }


def test_a_scene_shows_the_whole_state_that_was_received() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    assert scene(model).received.keys() == model.state_dict().keys()
    assert scene(model).kept == {}
    assert scene(model).notices is None


def test_a_guard_keeps_nothing_and_only_records_unless_it_says_otherwise() -> None:
    guard = Silent()
    assert guard.keep(scene(nn.Linear(2, 2))) == {}
    assert guard.refuse is False
    assert Silent(refuse=True).refuse is True
