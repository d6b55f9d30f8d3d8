"""Rehearsal: a made-up picture through the client and the closed forms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedsim.core.defense import Defense
from fedsim.core.learning import Update
from fedsim.lint.rehearsal import made_up
from tests.lint.conftest import defended, linted, predicts_exact


@dataclass(frozen=True)
class Doubling(Defense):
    """A defense of somebody's own that defends nothing."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: 2 * t for n, t in update.tensors.items()})


@dataclass(frozen=True)
class Silence(Defense):
    """A defense of somebody's own that ends everything."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: 0 * t for n, t in update.tensors.items()})


@dataclass(frozen=True)
class Broken(Defense):
    """A defense of somebody's own that fails."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        raise ValueError("a mistake of its own.")


def test_a_defense_of_somebodys_own_is_judged_by_what_it_does() -> None:
    useless = linted(defended(f"{__name__}:Doubling"))
    assert predicts_exact(useless)
    (note,) = useless.of("unknown-defense")
    assert "overrides protect_update" in note.reason
    silent = linted(defended(f"{__name__}:Silence"))
    assert not predicts_exact(silent)
    assert silent.exit_code == 0


def test_a_defense_that_fails_is_told_of_and_nothing_is_called_certain() -> None:
    result = linted(defended(f"{__name__}:Broken"))
    (note,) = result.of("not-rehearsed")
    assert "a mistake of its own" in note.reason
    assert "unjudged" in result.of("unknown-defense")[0].reason
    assert result.exit_code == 0


def test_made_up_pictures_are_stored_as_pictures_are() -> None:
    pictures = made_up(2, 16, torch.Generator().manual_seed(0))
    assert pictures.shape == (2, 3, 16, 16)
    assert 0 <= float(pictures.min()) < float(pictures.max()) <= 1
    assert torch.allclose(pictures * 255, (pictures * 255).round(), atol=1e-4)
    assert not torch.equal(pictures[0], pictures[1])
