"""APRIL by optimisation: matching with a cosine on the position embedding."""

from __future__ import annotations

import pytest

from fedsim.core.errors import AttackError
from tests.attacks.conftest import assert_recovered_through_attention
from tests.staging import TINY, attack, observe, photos


def test_april_recovers_an_image() -> None:
    assert_recovered_through_attention("april", alpha=0.1, box=True)


def test_april_declines_without_the_position_gradient() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    del observation.update.tensors["pos_embed"]
    with pytest.raises(AttackError, match="learned position embedding; the update has none"):
        attack(observation, "april", steps=2)
