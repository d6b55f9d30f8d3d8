"""The active server: asks its manoeuvre for the weights of each client, and lets it learn from what
comes back. An honest server has none, and sends everybody the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsim.core.errors import FedsimError, RunError
from fedsim.core.learning import Update
from fedsim.core.manoeuvre import Brief, Manoeuvre, Memory, Sighting, Tampered
from fedsim.core.observation import Public, most_pictures
from fedsim.core.seal import sealed
from fedsim.core.sent import Chosen
from fedsim.core.spec import Component, Spec
from fedsim.defenses.applied import announced, declared, hiding


class ActiveServer:
    """A manoeuvre at work in one federation: ``memory`` is what it learned in the rounds so far."""

    def __init__(
        self, manoeuvre: Manoeuvre, spec: Spec, public: Public, surrogate: Tensor | None = None
    ):
        assert spec.server.manoeuvre is not None
        self.component: Component = spec.server.manoeuvre
        self.manoeuvre, self.spec, self.public = manoeuvre, spec, public
        self.surrogate = surrogate
        self.memory: Memory = {}
        self.tampered: dict[int, Tampered] = {}  # of the round under way, by client
        self._round, self._weights = 0, dict[str, Tensor]()
        self._model = partial(announced, public)
        self._summed = hiding(declared(spec.defenses)) is not None

    def begin(self, round_: int, weights: dict[str, Tensor]) -> None:
        """Choose the weights of every client of a round."""
        self._round, self._weights, self.tampered = round_, weights, {}
        if round_ not in self.spec.tampered_rounds:
            return
        cohort = self.spec.cohort(round_)
        if self.manoeuvre.alike:
            self.tampered = dict.fromkeys(cohort, self._choice(cohort[0], cohort))
        else:
            self.tampered = {client: self._choice(client, cohort) for client in cohort}

    def sent_to(self, client: int) -> dict[str, Tensor]:
        """The whole state dict that a client was sent."""
        tampered = self.tampered.get(client)
        return {**self._weights, **tampered.changed} if tampered else self._weights

    def chosen_for(self, client: int) -> Chosen | None:
        """What is kept with the observation of a client whose weights were chosen."""
        tampered = self.tampered.get(client)
        if tampered is None:
            return None
        return Chosen(
            manoeuvre=self.component.model_dump(mode="json", exclude_none=True),
            about=tampered.about,
            words=tampered.words,
            asked=sorted(set(self.spec.server.clients or [])),
        )

    def take_in(self, replies: Iterable[tuple[int, Update]], stayed: Collection[int]) -> None:
        """Learn from the replies of the round, in the order of the clients; ``stayed`` are all who
        replied."""
        behind = tuple(sorted(stayed)) if self._summed else ()
        for client, update in replies:
            seen = self._sighting(client, update, behind)
            self._guarded("learn from a reply", self.manoeuvre.learn, seen, self.memory)
        self.memory = _plain(self.memory, self.component.name)

    def _choice(self, client: int, cohort: list[int]) -> Tampered:
        brief = Brief(
            *(self._round, client, tuple(cohort), self._weights, self._model, self.public),
            surrogate=self.surrogate,
            memory=self.memory,
            seed=self.spec.seed,
        )
        found = self._guarded("choose weights", self.manoeuvre.tamper, brief)
        name = self.component.name
        return Tampered(
            _checked(found.changed, self._weights, name), _plain(found.about, name), found.words
        )

    def _sighting(self, client: int, update: Update, behind: tuple[int, ...]) -> Sighting:
        tampered = self.tampered.get(client)
        pictures = most_pictures(self.public, update.num_examples)
        if behind:
            pictures *= len(behind)
        return Sighting(
            *(self._round, client, self.sent_to(client), update.widened()),
            about=tampered.about if tampered else {},
            model=self._model,
            public=self.public,
            pictures=pictures,
            stayed=behind,
        )

    def _guarded(self, what: str, do: Callable[..., Any], *about: Any) -> Any:
        """What a manoeuvre does, out of the vault's reach; its failure ends the run in a sentence:
        rounds without it would be those of an honest server."""
        try:
            with sealed(), torch.random.fork_rng(devices=[]):
                return do(*about)
        except FedsimError:
            raise
        except Exception as error:  # its author's
            raise RunError(
                f"the manoeuvre '{self.component.name}' could not {what} in round {self._round}: "
                f"{type(error).__name__}: {error}."
            ) from error


def _checked(
    changed: Mapping[str, Tensor], weights: Mapping[str, Tensor], name: str
) -> dict[str, Tensor]:
    """What really changes, as clients can load it."""
    found = {}
    for key, tensor in changed.items():
        if key not in weights or tensor.shape != weights[key].shape:
            raise RunError(f"the manoeuvre '{name}' changes '{key}', which the model does not have")
        plain = tensor.detach().cpu().to(weights[key].dtype).contiguous()
        if plain.is_floating_point() and not bool(torch.isfinite(plain).all()):
            raise RunError(f"the manoeuvre '{name}' gives '{key}' numbers that are not finite.")
        if not torch.equal(plain, weights[key].cpu()):
            found[key] = plain
    return found


def _plain(value: Any, name: str) -> Any:
    """A copy through JSON: what is kept is what is gone on with, whether a run is cut or not."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"the manoeuvre '{name}' keeps what is no plain value: {error}.") from error
