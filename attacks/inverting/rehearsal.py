"""Rehearsal: clients that the attacker simulates on its own pictures, by number.

A client of a number is always the same one: its pictures, their labels and the coins of its
defenses are drawn by the number. Every surrogate picture is used once as it is; after that in
variants: mirrored, shifted, brighter or darker.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.inverting.sketch import Sketch
from fedsim.attacks.labels import recover_labels
from fedsim.core.augment import Augmentation
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Batch, Update
from fedsim.core.seeds import seed_from

_FINEST = 32  # pixels of what is learned: no sketch shows more
_SHIFT = 1 / 8  # of a side, at most
_GAIN, _OFFSET = 0.2, 0.1  # of a variant's brightness, at most
_CHUNK = 64  # pictures that are classified together


@dataclass(frozen=True)
class Layout:
    """How many pictures stand behind an update: ``steps`` batches of ``size``, all different."""

    size: int
    steps: int = 1

    @property
    def pictures(self) -> int:
        return self.size * self.steps


@dataclass(frozen=True)
class Example:
    """One simulated client, or several of them stacked: what it saw, and what can be read of it."""

    sketch: Tensor  # (L,)
    pictures: Tensor  # (P, 3, R, R) in [0, 1], at the resolution of what is learned
    labels: Tensor  # (P,)
    read: Tensor  # (P,) sorted, as read from the update; -1 where they cannot be


class Rehearsal:
    """Simulated clients of one round, each with ``layout.pictures`` of these ``pictures``."""

    def __init__(
        self,
        view: View,
        pictures: Tensor,
        layout: Layout,
        *,
        entries: int,
        seed: int,
        device: torch.device,
        defended: bool = True,
    ):
        self.view, self.layout = view, layout
        self.device, self.defended = device, defended
        self.model = view.model().to(device)
        self.protocol = view.protocol()
        self._take(pictures, seed)
        self.sketch = Sketch.of(self._client(0)[2], entries, seed)

    def _take(self, pictures: Tensor, seed: int) -> None:
        self.pictures, self.seed = pictures, seed
        self.chances = _chances(self.model, self.protocol.normalise(pictures), self.device)
        self._turn = -1, torch.empty(0)

    def on(self, pictures: Tensor, purpose: str) -> Rehearsal:
        """The same with other pictures, and other coins."""
        other = copy.copy(self)
        other._take(pictures, seed_from(f"{self.seed} {purpose}"))
        return other

    @property
    def classes(self) -> int:
        return self.chances.shape[1]

    def example(self, number: int) -> Example:
        """The client of this number."""
        pictures, labels, update = self._client(number)
        sketch = self.sketch(update)
        read = read_labels(self.view, self.model, update, self.layout)
        if read is None:
            read = torch.full_like(labels, -1)
        return Example(sketch.half(), shrunk(pictures).half(), labels, read)

    def _client(self, number: int) -> tuple[Tensor, Tensor, Update]:
        coin = torch.Generator().manual_seed(seed_from(f"{self.seed} client {number}"))
        count, held = self.layout.pictures, len(self.pictures)
        places = range(number * count, (number + 1) * count)
        rows = [self._row(place) for place in places]
        pictures = self.pictures[rows]
        if places.stop > held:  # all were used once
            pictures = torch.stack([_variant(picture, coin) for picture in pictures])
        if self.protocol.augment:
            announced = Augmentation.of(self.protocol.augment, pictures.shape[-1])
            pictures = announced(pictures, f"{self.seed} augment {number}").images
        labels = torch.multinomial(self.chances[rows], 1, generator=coin)[:, 0]
        update = self.view.simulated(
            self.model, self._batches(pictures, labels), coin, defended=self.defended
        )
        return pictures, labels, update

    def _row(self, place: int) -> int:
        """The picture at a place; each time that all were used they come in another order."""
        turn, at = divmod(place, len(self.pictures))
        if self._turn[0] != turn:
            coin = torch.Generator().manual_seed(seed_from(f"{self.seed} turn {turn}"))
            self._turn = turn, torch.randperm(len(self.pictures), generator=coin)
        return int(self._turn[1][at])

    def _batches(self, pictures: Tensor, labels: Tensor) -> list[Batch]:
        pictures, labels = pictures.to(self.device), labels.to(self.device)
        size = self.layout.size
        return list(zip(pictures.split(size), labels.split(size), strict=True))


def read_labels(view: View, model: nn.Module, update: Update, layout: Layout) -> Tensor | None:
    """The labels (P,) behind an update, sorted; None where it does not show them."""
    try:
        return recover_labels(
            update,
            model,
            layout.pictures,
            protocol=view.known_protocol(),
            steps=layout.steps,
        )
    except AttackError:  # without labels a network can still be learned
        return None


def shrunk(pictures: Tensor) -> Tensor:
    """Pictures (N, 3, S, S) at the resolution of what is learned."""
    return F.interpolate(pictures, size=min(pictures.shape[-1], _FINEST), mode="area")


def batch_of(examples: Sequence[Example]) -> Example:
    """Several clients, stacked."""
    parts = [[getattr(e, name) for e in examples] for name in Example.__dataclass_fields__]
    return Example(*(torch.stack(part) for part in parts))


@torch.no_grad()
def _chances(model: nn.Module, normalised: Tensor, device: torch.device) -> Tensor:
    """What labels the pictures may have, (N, C): nobody says, so half what the model takes them
    for, and half any class."""
    mode = model.training
    model.eval()
    logits = torch.cat([model(part.to(device)).float().cpu() for part in normalised.split(_CHUNK)])
    model.train(mode)
    return (logits.softmax(1) + 1 / logits.shape[1]) / 2


def _variant(picture: Tensor, coin: torch.Generator) -> Tensor:
    """Another picture that might have been: mirrored or not, shifted, brighter or darker."""
    side = picture.shape[-1]
    mirror, left, top, gain, offset = torch.rand(5, generator=coin).tolist()
    shifted = F.pad(picture[None], [margin := int(side * _SHIFT)] * 4, mode="reflect")[0]
    across, down = (int(share * (2 * margin + 1)) for share in (left, top))
    cut = shifted[:, down : down + side, across : across + side]
    cut = cut.flip(-1) if mirror < 0.5 else cut
    return ((1 + _GAIN * (2 * gain - 1)) * cut + _OFFSET * (2 * offset - 1)).clamp(0, 1)
