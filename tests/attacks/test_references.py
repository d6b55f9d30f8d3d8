"""References: pictures of the attacker's own where it has some, bent natural ones where not."""

from __future__ import annotations

import torch

from fedsim.attacks.references import bent, reference_pictures
from fedsim.core.knowledge import THREATS, Announced, Assets, View
from fedsim.core.natural import natural_pictures
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations


def view(run: Run, surrogate: torch.Tensor | None = None) -> View:
    observation = read_observation(list_observations(run.observations)[0])
    announced = Announced(torch.nn.Identity)
    return View(observation, THREATS["D"].grants, announced, assets=Assets(surrogate))


def test_pictures_of_the_attackers_own_come_first_and_once(small_run: Run) -> None:
    own = torch.rand(10, 3, 32, 32)
    some, words = reference_pictures(view(small_run, own), 6)
    assert words == "the attacker's own pictures"
    assert len({one.numpy().tobytes() for one in some}) == 6
    assert all(any(torch.equal(one, picture) for picture in own) for one in some)
    more, _ = reference_pictures(view(small_run, own), 14)
    assert more.shape == (14, 3, 32, 32)


def test_without_any_they_are_natural_and_all_different(small_run: Run) -> None:
    looking = view(small_run)
    made, words = reference_pictures(looking, 40)
    assert made.shape == (40, 3, 32, 32)
    assert words == "natural pictures, bent"
    assert looking.ledger == ["image_size"]
    assert len({one.numpy().tobytes() for one in made}) == 40


def test_bent_pictures_are_pictures() -> None:
    made = bent(natural_pictures(16), 12, torch.Generator().manual_seed(0))
    assert made.shape == (12, 3, 16, 16)
    assert 0 <= float(made.min()) <= float(made.max()) <= 1
    assert float(made.std((1, 2, 3)).min()) > 0.01
    again = bent(natural_pictures(16), 12, torch.Generator().manual_seed(0))
    assert torch.equal(made, again)
    assert bent(natural_pictures(16), 0, torch.Generator()).shape == (0, 3, 16, 16)
