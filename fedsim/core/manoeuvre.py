"""Manoeuvre: what an active server does to the weights it sends, and what an update then means.

A manoeuvre composes with every attack, because an attack sees an observation whose weights are what
that client received. What it chose for a client is kept with the observation (``about``): nothing
but the server's own choice stands in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.core.learning import Update
from fedsim.core.observation import Public
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Spec

Memory = dict[str, Any]  # of plain values, as JSON has them: it is checkpointed with the rounds


@dataclass(frozen=True)
class Brief:
    """What a manoeuvre knows when it chooses the weights of one client."""

    round: int
    client: int
    cohort: tuple[int, ...]  # whoever is asked in this round, sorted
    weights: Mapping[str, Tensor]  # the honest state dict; never changed in place
    model: Callable[[], nn.Module]  # the architecture agreed on, without weights
    public: Public
    surrogate: Tensor | None = None  # images of the server's own (N, 3, H, W) in [0, 1], under G
    memory: Mapping[str, Any] = field(default_factory=dict)  # of earlier rounds
    seed: int = 0

    def loaded(self) -> nn.Module:
        """The honest model of this round, in the clients' mode."""
        model = self.model()
        model.load_state_dict(dict(self.weights))
        return model.train(self.public.protocol.mode == "train")

    def coin(self, purpose: str = "") -> torch.Generator:
        """The server's own coin: the same for the same run, round and client."""
        words = f"manoeuvre {self.seed} {self.round} {self.client} {purpose}"
        return torch.Generator().manual_seed(seed_from(words))


@dataclass(frozen=True)
class Tampered:
    """What one client is sent: the tensors that are not the honest ones, by name; ``about`` says in
    plain values what they were made for, and ``words`` says it in a sentence."""

    changed: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    words: str = ""


@dataclass(frozen=True)
class Sighting:
    """What came back from a client that had been sent chosen weights."""

    round: int
    client: int
    weights: Mapping[str, Tensor]  # the whole state dict that this client received
    update: Update  # where only a cohort's sum can be read: its mean
    about: Mapping[str, Any]
    model: Callable[[], nn.Module]  # the architecture agreed on, without weights
    public: Public
    pictures: int  # how many stand behind the update, by all that is public
    stayed: tuple[int, ...] = ()  # the clients whose sum it is, where it is one
    diluted: int = 1  # the update is a mean of so many, of whom one alone sent anything

    def loaded(self) -> nn.Module:
        """The model as this client received it, in the clients' mode."""
        model = self.model()
        model.load_state_dict(dict(self.weights))
        return model.train(self.public.protocol.mode == "train")


@dataclass(frozen=True)
class Isolated:
    """What an update means after a manoeuvre.

    ``update``: as if only the pictures that remain had been learned from, without the parts that
    the others still reach. ``pictures``: how many remain; 0, where none does, and nothing can be
    attacked. ``labels``: theirs, where they are known. ``count``: the estimate that ``pictures``
    rests on, where there is one.
    """

    update: Update
    pictures: int
    labels: Tensor | None = None
    count: float | None = None
    words: str = ""


class Manoeuvre:
    """Base of every manoeuvre: a frozen dataclass of its parameters.

    ``needs``: fields of `fedsim.core.knowledge` without which it is refused; ``uses``: fields that
    are handed to it where they are granted.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"tampering"})
    uses: ClassVar[frozenset[str]] = frozenset()
    alike: ClassVar[bool] = False  # whether all clients of a round are sent the same

    def check_model(self, model: nn.Module, public: Public) -> None:
        """Raise a SpecError for a model on which it cannot work, before a round runs."""

    def check_spec(self, spec: Spec) -> None:
        """Raise a SpecError for a federation in which it cannot work, before a round runs."""

    def aimed_at(self, round_: int, cohort: Sequence[int]) -> int | None:
        """The one client of a round that it singles out; None where it is after all of them."""
        return None

    def tamper(self, brief: Brief) -> Tampered:
        """The weights of one client in one round; with nothing changed, it gets the honest ones."""
        raise NotImplementedError

    def learn(self, seen: Sighting, memory: Memory) -> None:
        """Take what one reply tells into ``memory``, for the rounds to come."""

    def isolate(self, seen: Sighting) -> Isolated | None:
        """What an attack then reads; None where it reads the update as it came."""
        return None
