"""iDLG: DLG with the labels read first."""

from __future__ import annotations

from fedsim.attacks.idlg import IDlg
from tests.attacks.conftest import assert_far_better_than_a_guess, view_of
from tests.staging import CPU, convnet_observation, photos


def test_idlg_recovers_an_image_far_better_than_a_guess() -> None:
    assert_far_better_than_a_guess("idlg", steps=80)


def test_idlg_knows_the_label_before_the_search() -> None:
    observation, _ = convnet_observation()
    task = IDlg(steps=2).task(view_of(observation, "B"), CPU)
    assert task.labels.tolist() == [photos(16, [70])[1].tolist()]
