"""Attack: a View in, a Reconstruction out; Learner: an attack that learns from the traffic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from fedsim.core.candidates import SCORES
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import read_tensors, save_tensors, write_json
from fedsim.core.knowledge import Traffic, View
from fedsim.core.observation import Public
from fedsim.core.seal import sealed
from fedsim.core.spec import BASELINE as BASELINE
from fedsim.core.spec import Spec

TRAFFIC = "traffic"  # the field that a learner learns from, unless it says otherwise


class Progress(Protocol):
    """Called by a long attack after each step: steps done, steps in all, the loss."""

    def __call__(self, done: int, total: int, loss: float | None = None) -> None: ...


def no_progress(done: int, total: int, loss: float | None = None) -> None:
    """For callers that do not watch."""


EXACT = 1e-6  # of one minus a cosine: a thousandth of a layer's length


@dataclass(frozen=True)
class Fit:
    """How well a reconstruction explains the update, without the truth: one minus the cosine of
    what it would have given and what was observed, the mean over layers and the worst of them.
    ``complete``: it stands for all pictures behind the update, and where it is exact the update
    says enough for no others to be."""

    distance: float
    worst: float
    complete: bool

    @property
    def is_exact(self) -> bool:
        """Whether nothing of the update is left to explain."""
        return self.complete and self.worst < EXACT


@dataclass
class Reconstruction:
    """What an attack believes the client's batch was.

    ``images`` (B, 3, H, W) in [0, 1], ``labels`` (B,) or None where it has no belief, ``loss`` its
    own measure of fit (which never uses the truth), ``trace`` that measure over time, ``film`` the
    first images at a few of its steps, ``features`` (B, D) what it believes the head read of them
    (then there may be no images), ``membership`` (N, 1 or 2) what it says of each candidate that it
    was handed: how likely it was in the batch, and the same by its label alone (then there is
    nothing else; `fedsim.core.candidates`), ``notes`` what a reader of the result must know.
    """

    images: Tensor
    labels: Tensor | None = None
    loss: float | None = None
    trace: list[tuple[int, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    seconds: float = 0.0
    film: dict[int, Tensor] = field(default_factory=dict)
    features: Tensor | None = None
    membership: Tensor | None = None
    observation: str = ""  # the checksum of what it was made from
    fit: Fit | None = None  # where somebody asked for it
    made_by: str = ""  # a hash of the job that made it: attack, parameters, trial and seed
    code: str = ""  # a hash of the attack's source, where its author is not us

    @property
    def claims(self) -> bool:
        """Whether it says anything of the batch beside labels."""
        told = self.features is not None or self.membership is not None
        return told or len(self.images) > 0

    def save(self, path: Path) -> None:
        tensors = {"images": self.images.detach().cpu().float().contiguous()}
        for step, frame in self.film.items():  # for the eye only: a byte per number will do
            tensors[f"film.{step}"] = (frame.detach().cpu().clamp(0, 1) * 255).round().byte()
        if self.labels is not None:
            tensors["labels"] = self.labels.detach().cpu().long().contiguous()
        if self.features is not None:
            tensors["features"] = self.features.detach().cpu().float().contiguous()
        if self.membership is not None:
            tensors["membership"] = self.membership.detach().cpu().double().contiguous()
        about = {
            "loss": self.loss,
            "trace": self.trace,
            "notes": self.notes,
            "ledger": self.ledger,
            "seconds": self.seconds,
            "observation": self.observation,
            "fit": None if self.fit is None else asdict(self.fit),
            "made_by": self.made_by,
            "code": self.code,
        }
        save_tensors(path, tensors, {"about": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> Reconstruction:
        try:
            tensors, metadata = read_tensors(path)
            about = _About.model_validate_json(metadata["about"])
            images, labels = tensors["images"], tensors.get("labels")
            if images.ndim != 4 or not images.is_floating_point():
                raise DamagedError("its images are not a batch of pictures.")
            if labels is not None and (labels.ndim != 1 or labels.dtype != torch.long):
                raise DamagedError("its labels are not a list of classes.")
            features = tensors.get("features")
            if features is not None and (features.ndim != 2 or not features.is_floating_point()):
                raise DamagedError("its features are not rows of numbers.")
            membership = tensors.get("membership")
            if membership is not None and not _is_told(membership):
                raise DamagedError("its membership is not a few finite numbers for each candidate.")
            film = _film(tensors)
        except (DamagedError, OSError, KeyError, ValidationError) as error:
            raise RunError(
                f"the reconstruction '{path}' is damaged ({type(error).__name__}); "
                f"go on with `fedsim audit --resume` and it is made again."
            ) from error
        result = cls(images=images, labels=labels, film=film, **dict(about))
        result.features, result.membership = features, membership
        return result


def _is_told(membership: Tensor) -> bool:
    """Whether it is a row of finite numbers for each candidate, one for each column or the first
    alone."""
    rows = membership.ndim == 2 and 1 <= membership.shape[1] <= len(SCORES)
    return rows and membership.is_floating_point() and bool(torch.isfinite(membership).all())


def _film(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The frames of the film among a file's tensors, by step."""
    frames = {}
    for name, tensor in tensors.items():
        prefix, _, step = name.partition(".")
        if prefix == "film":
            if not step.isdecimal() or tensor.ndim != 4:
                raise DamagedError("its film is not made of pictures.")
            frames[int(step)] = tensor.float() / 255
    return dict(sorted(frames.items()))


class _About(BaseModel):
    """What a file says beside the images."""

    loss: float | None
    trace: list[tuple[int, float]]
    notes: list[str]
    ledger: list[str]
    seconds: float
    observation: str = ""
    fit: Fit | None = None
    made_by: str = ""
    code: str = ""


@runtime_checkable
class Attack(Protocol):
    """One file under ``attacks/``, or any dataclass with ``needs`` and ``reconstruct``.

    The rest may be left out: `complete` then adds it from here.
    """

    @property
    def needs(self) -> frozenset[str]:
        """The fields of a View that it cannot do without."""
        ...

    @property
    def uses(self) -> frozenset[str]:
        """Fields that it also reads, where they are granted."""
        return frozenset()

    def check_spec(self, spec: Spec) -> None:
        """Refuse, before any round runs, a spec with which it cannot work."""
        return

    def check_model(self, model: nn.Module, public: Public) -> None:
        """Refuse, before any round runs, a model or a protocol on which it cannot work."""
        return

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction: ...


def complete(kind: type) -> None:
    """Give an author's class what it may leave out of `Attack`."""
    for name in ("uses", "check_spec", "check_model"):
        if not hasattr(kind, name):
            setattr(kind, name, getattr(Attack, name))


@dataclass
class Lesson:
    """The record of one lesson of a learner: steps taken so far, losses, what it read."""

    steps: int = 0
    losses: list[list[float]] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))


@runtime_checkable
class Learner(Attack, Protocol):
    """An attack that learns from the traffic, a lesson after every observed round.

    It keeps what it learned in the folder ``memory``, which the View shows it when it attacks. A
    lesson that was cut short is given again, and goes on from what the folder holds. A picture
    ``samples.png`` in the folder is shown in the report.

    One that learns from pictures of the attacker's own says so: ``learns_from = "surrogate"``, the
    field of the View that its memory rests on. Its lessons are for the attacked rounds, each for
    that round alone, whose observations are the traffic that it is shown; ``lessons_before`` is
    not asked.
    """

    @property
    def learner(self) -> str:
        """The name of its memory: attacks that learn alike share one."""
        ...

    def lessons_before(self, rounds: int) -> int:
        """How many lessons must be over before it attacks, where ``rounds`` are observed."""
        ...

    def learn(
        self,
        traffic: Traffic,
        lesson: int,
        memory: Path,
        *,
        seed: int,
        device: torch.device,
        progress: Progress,
    ) -> Lesson: ...


@dataclass(frozen=True)
class Traits:
    """What an attack says of itself, in plain words."""

    needs: frozenset[str]
    uses: frozenset[str]
    learner: str | None  # the name of its memory, if it learns
    learns_from: str = TRAFFIC  # the field that its memory rests on

    @property
    def rehearses(self) -> bool:
        """Whether it learns for each attacked round alone, and not across observations."""
        return self.learner is not None and self.learns_from != TRAFFIC


def traits_of(attack: Attack) -> Traits:
    """Asked under the vault's seal: what answers may be a property, and its author's code."""
    with sealed():
        learner = attack.learner if isinstance(attack, Learner) else None
        learns_from = str.__str__(getattr(attack, "learns_from", TRAFFIC))
        return Traits(
            _words(attack.needs),
            _words(attack.uses),
            learner and str.__str__(learner),
            learns_from,
        )


def _words(said: Iterable[str]) -> frozenset[str]:
    return frozenset(str.__str__(word) for word in said)


def lessons_needed(attack: Attack, rounds: int) -> int:
    """How many lessons a learner wants before it attacks, where ``rounds`` are observed; none for
    an attack that does not learn. Asked under the seal as well."""
    with sealed():
        return int(attack.lessons_before(rounds)) if isinstance(attack, Learner) else 0


def needs_of(attack: Attack) -> frozenset[str]:
    """What an attack cannot do without; for a learner, what it learns from as well."""
    traits = traits_of(attack)
    return traits.needs | ({traits.learns_from} if traits.learner is not None else frozenset())


def reads_traffic(attack: Attack, granted: frozenset[str]) -> bool:
    """Whether it reads observations other than the one it attacks: this alone decides what is kept
    of the rounds between, and what travels to its worker."""
    return TRAFFIC in granted & (needs_of(attack) | traits_of(attack).uses)
