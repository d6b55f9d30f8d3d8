"""Guard: what a client checks of the weights it received, before it trains and uploads.

A guard knows what its client knows: the weights, its own batch, and what it kept of earlier rounds.
It says how suspicious they are (``score``) and from where on it speaks up (``limit``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedsim.core.learning import Batch, Protocol


@dataclass(frozen=True)
class Scene:
    """What a client has before it as it decides: the model it received, in the mode it trains in,
    its own batches (images in [0, 1]), and what its guards kept of the last round it took part in
    (``kept``; empty in its first). ``notices``: what others of its cohort say that they received,
    by client, where clients can talk to each other."""

    round: int
    client: int
    model: nn.Module
    batches: list[Batch]
    protocol: Protocol
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    notices: Mapping[int, str] | None = None

    @property
    def received(self) -> dict[str, Tensor]:
        """The state dict that was received."""
        return dict(self.model.state_dict())


@dataclass(frozen=True)
class Finding:
    """How suspicious a guard finds what was received; above the limit, it speaks up."""

    guard: str
    score: float
    limit: float
    words: str
    refused: bool = False  # the client did not upload

    @property
    def fired(self) -> bool:
        return not self.score <= self.limit  # what is no number is suspicious too

    def plain(self) -> dict[str, Any]:
        """For a file."""
        score = self.score if math.isfinite(self.score) else sys.float_info.max
        about = {"guard": self.guard, "score": score, "limit": self.limit}
        return {**about, "words": self.words, "fired": self.fired, "refused": self.refused}


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Base of every guard: a frozen dataclass of its parameters.

    ``refuse``: the client does not upload where the guard fires; otherwise it is only recorded.
    """

    refuse: bool = False

    def inspect(self, scene: Scene) -> Finding:
        """Look at what was received. The scene's model may be run, and is left as it was."""
        raise NotImplementedError

    def keep(self, scene: Scene) -> dict[str, Tensor]:
        """What to remember of this round for the next, small: by names that begin with the guard's
        own, as ``weight_check/norms``."""
        return {}
