"""Knowledge: what a threat model grants, and the View through which an attack reads it.

A View holds only what is granted: what is not cannot be reached through it. Reading anything else
raises `NotGranted`. What is read through a View, its copies and the processes forked with it is
recorded in its ledger, so that a report can say what a result rests on. That is a record for honest
code: whoever goes round the View's members leaves no trace there, and so no verdict on a picture
that came back rests on it.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedsim.core.candidates import CANDIDATES, Candidates
from fedsim.core.defense import Informed
from fedsim.core.errors import NotGranted, SpecError, did_you_mean
from fedsim.core.learning import Batch, Colour, Protocol, Update, local_update
from fedsim.core.ledger import Ledger
from fedsim.core.manoeuvre import Isolated
from fedsim.core.notebook import Notebook
from fedsim.core.observation import Observation
from fedsim.core.seal import is_sealed as is_sealed
from fedsim.core.seal import sealed as sealed
from fedsim.core.seeds import seed_from
from fedsim.core.spec import ServerSpec, ThreatSpec

FIELDS: dict[str, str] = {
    "update": "the update the client uploaded",
    "weights": "the weights the server sent",
    "architecture": "the model's architecture and whether it runs in train or eval mode",
    "image_size": "the side of the client's images",
    "normalisation": "mean and standard deviation of the input normalisation",
    "batch_size": "how many images stand behind one gradient",
    "optimizer": "how the client trains: optimiser, schedule, loss, augmentation, numbers",
    "learning_rate": "the local learning rate",
    "local_steps": "how many local steps or epochs the client takes",
    "defenses": "the defenses the client declares",
    "surrogate": "images of the attacker's own from a similar source",
    "priors": "pretrained networks of natural images",
    "generator": "a generator trained on images of the attacker's own",
    "batch_statistics": "BatchNorm statistics of the private batch",
    "label_distribution": "how the client's labels are distributed",
    "tampering": "the server may change the model it sends",
    "client_choice": "the server chooses which clients train",
    "traffic": "the updates of other clients and other rounds",
    "oracle_labels": "the true labels of the private batch",
    "candidates": "pictures that may be in the batch, for attacks that claim none",
}

# The member of the View that gives out each field. A field without a reader is out of every
# attack's reach: nothing grants it, and a threat model that acts by it is refused.
READERS: dict[str, str] = {
    "update": "update",
    "weights": "weights",
    "architecture": "model",
    "image_size": "image_size",
    "normalisation": "normalisation",
    "batch_size": "batch_size",
    "optimizer": "protocol",
    "learning_rate": "learning_rate",
    "local_steps": "local_steps",
    "defenses": "defenses",
    "surrogate": "surrogate",
    "priors": "prior",
    "generator": "generator",
    "batch_statistics": "batch_statistics",
    "tampering": "chosen",
    "client_choice": "asked",
    "traffic": "traffic",
    "oracle_labels": "oracle_labels",
    "candidates": "candidates",
}
ACTIVE = frozenset({"tampering", "client_choice"})  # what a server does, not what it knows


@dataclass(frozen=True)
class Threat:
    """A threat model, after the SoK of USENIX Security 2025."""

    letter: str
    name: str
    grants: frozenset[str]
    words: str

    @property
    def deeds(self) -> frozenset[str]:
        """What a server does under it, beside what it knows."""
        return self.grants & ACTIVE


def _threats() -> dict[str, Threat]:
    a = frozenset({"update", "weights", "traffic"})
    b = a | {"architecture", "image_size", "normalisation", "batch_size"}
    c = b | {"optimizer", "learning_rate", "local_steps", "defenses"}
    d = c | {"surrogate", "priors", "generator"}
    e = d | {"batch_statistics", "label_distribution"}
    f = c | {"tampering"}
    g = f | {"surrogate", "priors", "generator"}
    h = f | {"client_choice"}
    rows = [
        ("A", "eavesdropper", a, "Somebody who reads the traffic: weights and updates."),
        ("B", "informed", b, "Reads the traffic and knows the model and the shape of its input."),
        ("C", "parameter-aware", c, "The server itself, which knows how its clients train."),
        ("D", "data-enhanced", d, "A server that owns similar data and pretrained networks."),
        ("E", "statistics-informed", e, "A server with data and statistics of the batch."),
        ("F", "active", f, "A server that may change the model it sends."),
        ("G", "active with data", g, "An active server that also owns similar data."),
        ("H", "active, choosing", h, "An active server that also chooses the clients."),
    ]
    return {letter: Threat(letter, name, grants, words) for letter, name, grants, words in rows}


THREATS: dict[str, Threat] = _threats()


def granted_by(threat: ThreatSpec) -> frozenset[str]:
    """The fields that a spec's threat section grants."""
    unknown = [name for name in threat.withhold if name not in FIELDS]
    if unknown:
        raise SpecError(
            f"threat.withhold: there is no field '{unknown[0]}'{did_you_mean(unknown[0], FIELDS)}."
        )
    extra = {"oracle_labels"} if threat.oracle_labels else set()
    extra |= {CANDIDATES} if threat.candidates else set()
    return ((THREATS[threat.model].grants | extra) & READERS.keys()) - set(threat.withhold)


def refuse_unplayed(threat: ThreatSpec, server: ServerSpec) -> None:
    """Raise where a server does not do what its threat model is about, or does more: the audit
    would be that of another one."""
    chosen = THREATS[threat.model]
    about = f"threat {chosen.letter} ({chosen.name})"
    if server.manoeuvre is not None and "tampering" not in chosen.deeds:
        raise SpecError(
            f"server.manoeuvre changes the weights that are sent, which {about} does not grant; "
            f"threat F does, G with data of the server's own, H with clients of its choice."
        )
    if server.clients and "client_choice" not in chosen.deeds:
        raise SpecError(
            f"server.clients chooses whom to ask, which {about} does not grant; H does."
        )
    if server.manoeuvre is None and "tampering" in chosen.deeds:
        raise SpecError(
            f"{about} changes the weights it sends: say how, server.manoeuvre.name=fishing; C is "
            f"the same server without that."
        )
    if not server.clients and "client_choice" in chosen.deeds:
        raise SpecError(f"{about} chooses whom it asks: say whom, server.clients=[0].")


ModelFactory = Callable[[], nn.Module]
Statistics = dict[str, tuple[Tensor, Tensor]]  # BatchNorm layer -> mean and variance


@dataclass(frozen=True)
class PriorModel:
    """A pretrained network of natural images, and the normalisation it expects."""

    name: str
    model: nn.Module
    mean: Colour
    std: Colour


@dataclass(frozen=True)
class Traffic:
    """The observations of a federation so far, opened one at a time: they may be large."""

    addresses: tuple[tuple[int, int], ...]  # (round, client), in order
    open: Callable[[int, int], View]

    def __len__(self) -> int:
        return len(self.addresses)


@dataclass(frozen=True)
class Announced:
    """What the federation agreed on: its model, without weights, how an update is read by somebody
    who knows the declared defenses, and how a client trains under them."""

    model: ModelFactory
    counter: Callable[[nn.Module], Informed] | None = None
    client: Client = local_update


class Client(typing.Protocol):
    """A client's work in one round, as `local_update` does it without defenses."""

    def __call__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        protocol: Protocol,
        *,
        rng: torch.Generator,
        seed: int,
    ) -> Update: ...


@dataclass(frozen=True)
class Assets:
    """What an attacker owns beside the observation; None for what it does not own."""

    surrogate: Tensor | None = None
    prior: Callable[[], PriorModel] | None = None
    generator: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class Secrets:
    """What a threat model grants of the truth itself, for one observation."""

    labels: Tensor | None = None
    statistics: Statistics | None = None
    candidates: Candidates | None = None  # for an attack that asks for them


@dataclass(frozen=True)
class Desk:
    """Where one attack works: the seed of its coin, the ledger of what it read, the notebook of
    what it worked out itself, the memory of what it learned and the field that this rests on. None
    of it is knowledge."""

    seed: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    notebook: Notebook | None = None
    memory: Path | None = None
    learned_from: str = "traffic"


class View:
    """What one attack may see of one observation; ``round`` and ``client`` are the envelope."""

    def __init__(
        self,
        observation: Observation,
        granted: frozenset[str],
        announced: Announced,
        *,
        assets: Assets | None = None,
        secrets: Secrets | None = None,
        traffic: Callable[[], Traffic] | None = None,
        desk: Desk | None = None,
        isolated: Isolated | None = None,
    ):
        assets, secrets = assets or Assets(), secrets or Secrets()
        public, protocol = observation.public, observation.public.protocol
        chosen = observation.chosen
        known: dict[str, Any] = {
            "update": (isolated or observation).update.widened(),
            "weights": observation.weights,
            "architecture": (announced.model, protocol.mode),
            "image_size": public.image_size,
            "normalisation": (protocol.mean, protocol.std),
            "batch_size": isolated.pictures if isolated is not None else public.batch_size,
            "optimizer": _training_of(protocol),
            "learning_rate": protocol.lr,
            "local_steps": (public.local_steps, public.local_epochs),
            "defenses": public.defenses,
            "surrogate": assets.surrogate,
            "oracle_labels": secrets.labels,
            "candidates": secrets.candidates,
            "batch_statistics": secrets.statistics,
            "priors": assets.prior,
            "generator": assets.generator,
            "tampering": (isolated, dict(chosen.about) if chosen is not None else {}),
            "client_choice": tuple(chosen.asked) if chosen is not None else (),
            "traffic": traffic,
        }
        self._known = {field: known[field] for field in granted if known.get(field) is not None}
        self._granted = granted
        self._counter = announced.counter if {"update", "defenses"} <= granted else None
        self._client = announced.client if "defenses" in granted else local_update
        self._desk = desk or Desk()
        self.round, self.client = observation.round, observation.client

    def __copy__(self) -> View:
        """Another View of the same, at the same desk: what is read through it is read."""
        twin = object.__new__(type(self))
        twin.__dict__ |= {**self.__dict__, "_known": dict(self._known)}
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        memo[id(self._desk)] = self._desk
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ |= copy.deepcopy(self.__dict__, memo)
        return twin

    def __reduce__(self) -> NoReturn:
        self._desk.ledger.__reduce__()

    @property
    def ledger(self) -> list[str]:
        """The fields that were read, in the order of the first read."""
        return list(self._desk.ledger)

    @property
    def notebook(self) -> Notebook | None:
        """Where an attack keeps what it worked out itself from this observation."""
        return self._desk.notebook

    @property
    def granted(self) -> frozenset[str]:
        """What the threat model grants; asking does not count as reading."""
        return self._granted

    @property
    def memory(self) -> Path | None:
        """Where an attack keeps what it learned: this counts as reading what it learned from."""
        if self._desk.memory is not None:
            self._field(self._desk.learned_from)
        return self._desk.memory

    def grants(self, field: str) -> bool:
        """Whether ``field`` may be read and is there; asking does not count as reading."""
        return field in self._known

    def coin(self, purpose: str = "") -> torch.Generator:
        """The attacker's own coin, one for each purpose: the same for the same observation, attack
        and trial."""
        salt = seed_from(purpose) if purpose else 0
        return torch.Generator().manual_seed(self._desk.seed ^ salt)

    @property
    def update(self) -> Update:
        value: Update = self._field("update")
        return value

    @property
    def weights(self) -> dict[str, Tensor]:
        value: dict[str, Tensor] = self._field("weights")
        return value

    @property
    def image_size(self) -> int:
        return int(self._field("image_size"))

    @property
    def normalisation(self) -> tuple[Colour, Colour]:
        value: tuple[Colour, Colour] = self._field("normalisation")
        return value

    @property
    def batch_size(self) -> int:
        return int(self._field("batch_size"))

    @property
    def learning_rate(self) -> float:
        return float(self._field("learning_rate"))

    @property
    def local_steps(self) -> tuple[int | None, int | None]:
        """Local steps and local epochs; one of them is None."""
        value: tuple[int | None, int | None] = self._field("local_steps")
        return value

    @property
    def defenses(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = self._field("defenses")
        return value

    def informed(self, model: nn.Module) -> Informed:
        """The update as read by somebody who knows the declared defenses; without that knowledge,
        as it is. ``model`` is set up as the client's was, as far as the defenses tell."""
        if not self.grants("defenses") or not self.defenses or self._counter is None:
            return Informed(self.update)
        self._field("update")
        return self._counter(model)

    def simulated(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        coin: torch.Generator,
        *,
        defended: bool = True,
    ) -> Update:
        """What a client of the attacker's own uploads that learns from these batches as announced;
        ``defended`` as declared, where that is known, by coins drawn from ``coin``. A cohort whose
        masked uploads are read as one is one client with the batch of all."""
        defended = defended and self.grants("defenses") and bool(self.defenses)
        client = self._client if defended else local_update
        secret = int(torch.randint(2**62, (), generator=coin))
        drawn = torch.Generator().manual_seed(secret)
        return client(model, batches, self.protocol(), rng=drawn, seed=secret).widened()

    @property
    def surrogate(self) -> Tensor:
        """Images of the attacker's own, (N, 3, H, W) in [0, 1]."""
        value: Tensor = self._field("surrogate")
        return value

    @property
    def oracle_labels(self) -> Tensor:
        value: Tensor = self._field("oracle_labels")
        return value

    @property
    def candidates(self) -> Candidates:
        """Pictures of which some are in the private batch."""
        value: Candidates = self._field("candidates")
        return value

    @property
    def batch_statistics(self) -> Statistics:
        """Mean and variance of the private batch at every BatchNorm layer."""
        value: Statistics = self._field("batch_statistics")
        return value

    @property
    def chosen(self) -> dict[str, Any]:
        """What the server chose this client's weights for; empty where it sent the round's."""
        value: dict[str, Any] = self._field("tampering")[1]
        return value

    @property
    def isolated(self) -> Isolated | None:
        """What the server's manoeuvre left of the batch; None where it left it whole, and where
        the server changes nothing. `update` and `batch_size` are of what is left."""
        if not self.grants("tampering"):
            return None
        value: Isolated | None = self._field("tampering")[0]
        return value

    @property
    def asked(self) -> tuple[int, ...]:
        """The clients that the server asks in every round."""
        value: tuple[int, ...] = self._field("client_choice")
        return value

    def prior(self) -> PriorModel:
        """The attacker's pretrained network of natural images."""
        value: PriorModel = self._field("priors")()
        return value

    def generator(self) -> nn.Module:
        """The attacker's trained generator of images; see `fedsim.attacks.generators`."""
        value: nn.Module = self._field("generator")()
        return value

    @property
    def traffic(self) -> Traffic:
        value: Traffic = self._field("traffic")()
        return value

    def model(self) -> nn.Module:
        """A fresh model as the client received it: architecture, weights, mode."""
        factory, mode = self._field("architecture")
        model: nn.Module = factory()
        model.load_state_dict(self.weights)
        return model.train(mode == "train")

    def protocol(self) -> Protocol:
        """The client's whole protocol, for simulating several local steps."""
        lr, (mean, std) = self.learning_rate, self.normalisation
        _, mode = self._field("architecture")
        training: Protocol = self._field("optimizer")
        return replace(training, lr=lr, mean=mean, std=std, mode=mode)

    def known_protocol(self) -> Protocol | None:
        """The client's whole protocol, where all of it is granted."""
        wanted = ("optimizer", "learning_rate", "normalisation", "architecture")
        return self.protocol() if all(map(self.grants, wanted)) else None

    def _field(self, name: str) -> Any:
        if name not in self._granted:
            raise NotGranted(
                f"the attack read '{name}' ({FIELDS[name]}), which its threat model does not "
                f"grant; it grants {', '.join(sorted(self._granted))}."
            )
        if name not in self._known:
            raise NotGranted(f"'{name}' is granted but was not provided; see the threat section.")
        self._desk.ledger.note(name)
        return self._known[name]


def _training_of(protocol: Protocol) -> Protocol:
    """A protocol without what is granted under other names: rate, normalisation and mode."""
    blank = Protocol()
    return replace(protocol, lr=blank.lr, mean=blank.mean, std=blank.std, mode=blank.mode)
