"""Stages: each starts from where the one before ended, and none is done twice."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsim.attacks import create_attack
from fedsim.attacks.matching import Budget, Pixels, Stage
from fedsim.attacks.matching.stages import search_stages
from fedsim.core.attack import no_progress
from fedsim.core.notebook import Notebook
from tests.attacks.conftest import view_of
from tests.staging import CPU, convnet_observation


def test_a_stage_begins_with_what_the_one_before_found(tmp_path: Path) -> None:
    observation, _ = convnet_observation()
    attack = create_attack("inverting_gradients")
    view = view_of(observation, "B", notebook=Notebook(tmp_path / "page.safetensors"))
    task = attack.task(view, CPU)
    low, high = task.problem.box
    begun: list[torch.Tensor] = []

    def again(before: list[torch.Tensor]) -> Pixels:
        begun.extend(before)
        return Pixels(before[0].clone(), low, high)

    stages = [
        Stage("first", lambda before: attack.pixels(task.problem), Budget(3)),
        Stage("second", again, Budget(2)),
    ]
    told: list[tuple[int, int]] = []
    found = search_stages(
        stages, task, list, lambda done, total, loss=None: told.append((done, total))
    )
    assert len(begun) == 1
    assert begun[0].shape == attack.start(task.problem).shape
    assert told[-1] == (5, 5)
    assert max(step for step, _ in found.trace) <= 5
    assert not list(tmp_path.glob("*done*"))  # the pages between the stages are cleared
    alone = search_stages(stages[:1], task, list, no_progress)
    assert found.loss <= alone.loss
