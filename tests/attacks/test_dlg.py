"""DLG: pictures and soft labels searched together, by the gradient alone."""

from __future__ import annotations

from fedsim.attacks.dlg import Dlg
from tests.attacks.conftest import assert_far_better_than_a_guess, view_of
from tests.staging import CPU, convnet_observation


def test_dlg_recovers_an_image_far_better_than_a_guess() -> None:
    assert_far_better_than_a_guess("dlg", steps=120)


def test_dlg_searches_soft_labels_and_has_no_prior() -> None:
    observation, _ = convnet_observation()
    attack = Dlg(steps=2)
    task = attack.task(view_of(observation, "B"), CPU)
    assert task.labels.shape == (1, 1, 8)  # a seed, a picture, a logit for each class
    assert task.labels.is_floating_point()
    assert attack.terms(task.problem) == []
