"""Problem: one observation as a matching attack sees it, and what is assumed of its client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

from fedsim.attacks.labels import batch_size_from_rank
from fedsim.attacks.matching.epochs import spread_rows
from fedsim.attacks.matching.ranges import Count, Weight
from fedsim.core.defense import Informed
from fedsim.core.epochs import epoch_rows, samples_of_epoch
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View, granted_by
from fedsim.core.learning import Protocol, Update
from fedsim.core.losses import Loss
from fedsim.core.spec import Spec, Upload

Simulation = Literal["single", "unroll", "surrogate"]
LocalName = Literal["auto", "single", "unroll", "surrogate"]

_STEPS_KNOWN = frozenset({"optimizer", "learning_rate", "local_steps"})
_UNKNOWN_STEPS = "local: unroll needs the client's optimiser and learning rate."
UNKNOWN_SIZE = (
    "the size of a gradient cannot be told from this weight delta; only an objective that compares "
    "directions (cosine) can match it."
)
_UNROLLED_AT_MOST = 16  # local steps; beyond, auto takes the surrogate, whose cost does not grow


@dataclass
class Problem:
    """One observation as a matching attack sees it."""

    view: View
    device: torch.device
    model: nn.Module
    update: Update
    side: int
    count: int  # images to find
    batches: list[list[int]]  # which of them each local step used, as far as one can know
    local: Simulation
    masked: bool  # zeros of the update were not uploaded
    labels: Tensor | None = None  # (B,), once they are read and where they are not searched
    notes: list[str] = field(default_factory=list)
    undo: Callable[[Tensor], Tensor] | None = None  # from the network's input to the pictures
    copies: int = 1  # of every picture, one for each epoch where they are searched apart

    @property
    def epochs(self) -> int:
        """How often the client goes over what it has, as far as that is known."""
        known = self.view.grants("local_steps") and self.update.kind is Upload.DELTA
        return (self.view.local_steps[1] or 1) if known else 1

    @property
    def clipped(self) -> bool:
        """Whether this is the gradient of a client that clips, simulated as a step of its own."""
        return self.local == "unroll" and self.update.kind is Upload.GRADIENT

    @property
    def loss(self) -> Loss:
        """The client's loss, where it is known; else plain cross-entropy."""
        protocol = self.view.known_protocol()
        return Loss() if protocol is None else protocol.loss

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """Black and white after normalisation."""
        mean, std = (torch.tensor(c, device=self.device) for c in self.view.normalisation)
        return ((0 - mean) / std).view(3, 1, 1), ((1 - mean) / std).view(3, 1, 1)

    def normalised(self, images: Tensor) -> Tensor:
        low, high = self.box
        return images.to(self.device) * (high - low) + low

    def pixels(self, images: Tensor) -> Tensor:
        """The client's pictures, in [0, 1], where the network was shown these."""
        low, high = self.box
        shown = ((images - low) / (high - low)).clamp(0, 1)
        return shown if self.undo is None else self.undo(shown)


@dataclass(frozen=True, kw_only=True)
class ClientParameters:
    """``masked``: match only what is not zero in the update; ``adaptive``: use what is known of the
    client's defenses; ``local``: how several local steps are simulated; ``pictures``: how many
    images to find, where the protocol does not tell. ``order``: of pictures over epochs, which
    only the client knows: ``fixed`` assumes one for all epochs, ``free`` searches each epoch's
    pictures apart, held together by a prior of the weight ``agree`` (see `epochs`).
    """

    masked: bool = False
    adaptive: bool = True
    local: LocalName = "auto"
    pictures: Count | None = None
    order: Literal["fixed", "free"] = "fixed"
    agree: Weight = 0.1

    def problem(self, view: View, device: torch.device) -> Problem:
        """The problem that the update poses, as far as the view tells."""
        model = view.model().to(device)
        informed = view.informed(model) if self.adaptive else Informed(view.update)
        update, notes = informed.update, list(informed.notes)
        if view.grants("batch_size"):
            size = view.batch_size
        else:
            size = batch_size_from_rank(update, model)
            notes.append(f"batch size {size}, from the rank of the update")
        pictures = self.pictures
        if view.grants("oracle_labels"):
            pictures = len(view.oracle_labels)
        batches = _batches(view, update, size, pictures)
        local = _simulation(self.local, view, update, len(batches), notes)
        copies = self._copies(view, update, local, notes)
        if copies > 1:
            once = max(max(rows) for rows in batches) + 1
            batches = spread_rows(once, size, copies)
        count = pictures or size
        if local != "single":
            count = max(max(rows) for rows in batches) + 1
        masked = self.masked or informed.masked
        side = view.image_size
        return Problem(
            *(view, device, model, update, side, count, batches, local, masked),
            notes=notes,
            undo=informed.undo,
            copies=copies,
        )

    def _copies(self, view: View, update: Update, local: Simulation, notes: list[str]) -> int:
        """How often every picture is searched; a note where several epochs are not simulated."""
        if update.kind is Upload.GRADIENT or not view.grants("local_steps"):
            return 1
        epochs = view.local_steps[1] or 1
        protocol = view.known_protocol()
        if epochs == 1 or (protocol is not None and protocol.augment):
            return 1
        if local != "unroll":
            notes.append(f"{epochs} epochs are seen as one gradient, which has no order")
            return 1
        return epochs if self.order == "free" else 1


def refuse_local(local: LocalName, spec: Spec, *, feels_size: bool) -> None:
    """Raise for weight deltas that cannot be simulated as asked, or whose cost needs the size of a
    gradient that nobody can tell: what `_simulation_of_steps` and the target find out later."""
    if spec.train.upload is not Upload.DELTA:
        return
    granted, steps = granted_by(spec.threat), spec.train.local_steps or 1
    knows = granted >= _STEPS_KNOWN
    if local == "unroll" and not knows:
        raise AttackError(_UNKNOWN_STEPS)
    many = local == "surrogate" or (local == "auto" and knows and steps > _UNROLLED_AT_MOST)
    lost = local != "unroll" and "learning_rate" not in granted
    if feels_size and (lost or (many and steps > 1)):
        raise AttackError(UNKNOWN_SIZE)


def unrolled_protocol(view: View) -> Protocol:
    """The steps to unroll; a clipped gradient is the (negative) delta of one step of size one."""
    protocol = view.protocol()
    match protocol.upload:
        case Upload.DELTA:
            return protocol
        case Upload.GRADIENT:
            return replace(protocol, lr=1.0, momentum=0.0, weight_decay=0.0)
        case other:
            assert_never(other)


def _simulation(
    local: LocalName, view: View, update: Update, steps: int, notes: list[str]
) -> Simulation:
    """How the client is simulated; ``auto`` by what is known of its steps."""
    knows = all(map(view.grants, _STEPS_KNOWN))
    match update.kind:
        case Upload.GRADIENT:
            clips = knows and view.protocol().clip is not None
            return "unroll" if clips and local in ("auto", "unroll") else "single"
        case Upload.DELTA:
            return _simulation_of_steps(local, view, knows, steps, notes)
        case other:
            assert_never(other)


def _simulation_of_steps(
    local: LocalName, view: View, knows: bool, steps: int, notes: list[str]
) -> Simulation:
    """How a client is simulated that uploads the change of its weights."""
    plain = knows and view.protocol().optimizer == "sgd" and view.protocol().clip is None
    if plain and steps == 1:
        return "single"
    if local != "auto":
        if local == "unroll" and not knows:
            raise AttackError(_UNKNOWN_STEPS)
        return local
    if not knows:
        notes.append("a weight delta is matched as if it were one gradient step")
        return "single"
    return "unroll" if steps <= _UNROLLED_AT_MOST else "surrogate"


def _batches(view: View, update: Update, size: int, pictures: int | None) -> list[list[int]]:
    """Which images each local step used, as the protocol lets one assume.

    Epochs go over the same images each time (in an order that only the client knows; ours is
    fixed), augmented ones over new views of them; plain steps take new ones each time, unless
    ``pictures`` says there are fewer.
    """
    if update.kind is Upload.GRADIENT or not view.grants("local_steps"):
        return [list(range(pictures or size))]
    steps, epochs = view.local_steps
    protocol = view.known_protocol()
    if epochs and protocol is not None and protocol.augment:
        count = samples_of_epoch(update.num_examples, epochs)
        each = epoch_rows(count, size)
        return [[e * count + row for row in rows] for e in range(epochs) for rows in each]
    if epochs:
        count = pictures or samples_of_epoch(update.num_examples, epochs)
        return [list(rows) for rows in epoch_rows(count, size)] * epochs
    total = (steps or 1) * size
    count = min(pictures or total, total)
    return [
        [row % count for row in range(step * size, (step + 1) * size)] for step in range(steps or 1)
    ]
