"""Defense: what a client does to its model, batch, gradient or update before uploading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedsim.core.learning import Update


@dataclass(frozen=True)
class Exposure:
    """How often a federation uses a client's samples: what a privacy budget is computed from."""

    rate: float  # the share of its samples that a client uses in a step
    steps: int  # over all rounds it takes part in
    rounds: int


@dataclass(frozen=True)
class Budget:
    """A differential-privacy guarantee after all rounds; ``protects`` says whom or what."""

    epsilon: float
    delta: float
    protects: str


@dataclass(frozen=True)
class Informed:
    """An update as read by a server that knows how the client defends itself."""

    update: Update
    masked: bool = False  # zeros were not uploaded: they say nothing
    notes: tuple[str, ...] = ()
    undo: Callable[[Tensor], Tensor] | None = None  # from the network's input to the pictures


class Defense:
    """Base of every defense: a dataclass of its parameters that overrides what it changes.

    All randomness comes from ``rng``, whose seed stays with the client. ``spares``: by chance, some
    steps are left as they were.
    """

    spares: ClassVar[bool] = False

    def at_round(self, round_: int, client: int, cohort: Sequence[int]) -> Defense:
        """The defense as one client of a cohort uses it in one round (counted from 1): for
        schedules, and for what clients do together."""
        return self

    def recall(self, kept_back: Mapping[str, Tensor]) -> Defense:
        """The defense of a client that kept this back in the last round in which it took part."""
        return self

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture or what is trained; known to client and server alike."""
        return model

    def check_trained(self, model: nn.Module) -> None:
        """Refuse a model that trains nothing of what the defense protects; one that acts on
        whatever is uploaded has nothing to refuse."""
        return

    def choose(self, labels: np.ndarray, size: int, coin: np.random.Generator) -> np.ndarray | None:
        """Which samples of its shard, by their labels, a client draws for a batch of ``size``; None
        leaves it to chance."""
        return None

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Change one batch, images (B, 3, H, W) in [0, 1], before it is learned from."""
        return images, labels

    def toss(self, model: nn.Module, rng: torch.Generator) -> None:
        """Lay the client's coin where its model draws from it in the step to come; no other copy of
        the model has one."""
        return

    def tossed(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """What the coin changed inside the network in the step that was made, before and after."""
        return None

    def penalty(self, model: nn.Module) -> Tensor | None:
        """A term of the client's loss beside that of the classification."""
        return None

    def batch_gradient(
        self, model: nn.Module, images: Tensor, labels: Tensor, rng: torch.Generator
    ) -> dict[str, Tensor] | None:
        """The gradient of a batch (images normalised), where it takes more than a backward pass."""
        return None

    def protect_gradient(
        self, gradient: dict[str, Tensor], rng: torch.Generator
    ) -> dict[str, Tensor]:
        """Change one step's gradient before it is applied or uploaded."""
        return gradient

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        """Change the finished update, the last thing before the upload."""
        return update

    def keep_back(self, before: Update, after: Update) -> dict[str, Tensor]:
        """What the client keeps of this round, for `recall` in its next."""
        return {}

    def without_noise(self) -> tuple[Defense, float] | None:
        """Where Gaussian noise is the last thing that happens to an update: the defense without it,
        and the deviation of the noise; None otherwise. Whoever does not know the client's coins can
        still tell whether that is the noise."""
        return None

    def encoded_bytes(self, update: Update) -> int | None:
        """The bytes of the upload when it is encoded as this defense allows; None where the defense
        changes nothing about that."""
        return None

    def budget(self, exposure: Exposure) -> Budget | None:
        """The differential-privacy guarantee, where the defense gives one."""
        return None

    def reveal(
        self, total: Mapping[str, Tensor], round_: int, cohort: Sequence[int], stayed: Sequence[int]
    ) -> dict[str, Tensor] | None:
        """Where single uploads mean nothing: the sum of the updates of those who ``stayed``, from
        the sum of what they uploaded. None where the server can read each upload."""
        return None

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """What an informed server does about this defense, given the update it saw and its own copy
        of the model (prepared, loaded), which it may set up as the client's was."""
        return seen
