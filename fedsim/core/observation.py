"""Observation: one client, one round, as the server saw it. Never a private pixel or label.

On disk, under ``observations/round-0001/``: ``weights.safetensors`` (what was sent, once for the
round), ``client-0003.safetensors`` (what came back) and ``client-0003.json`` (what the protocol
makes public, with checksums; written last, so it says that the rest is there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, assert_never

from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from fedsim.core.errors import (
    DamagedError,
    ForeignObservationError,
    MisplacedObservationError,
    ObservationError,
)
from fedsim.core.files import checksum, read_json, read_tensors, save_tensors, write_json
from fedsim.core.learning import Protocol, Update
from fedsim.core.run import address_of, observation_name, observation_path, paths, weights_path
from fedsim.core.sent import Chosen, Places, files_of, read_sent
from fedsim.core.spec import Component, ModelSpec, Positive, Spec, Upload
from fedsim.core.text import brief

FORMAT = 1
_UPDATE, _BUFFER = "update/", "buffer/"


@dataclass(frozen=True)
class Public:
    """What the protocol makes public: the server announced it, or it is in the upload."""

    architecture: dict[str, Any]  # the spec's model section
    num_classes: int
    image_size: int
    batch_size: int
    local_steps: int | None
    local_epochs: int | None
    protocol: Protocol
    defenses: list[dict[str, Any]]  # as declared

    @classmethod
    def of(cls, spec: Spec, num_classes: int, round_: int = 1) -> Public:
        return cls(
            architecture=spec.model.model_dump(mode="json"),
            num_classes=num_classes,
            image_size=spec.data.image_size,
            batch_size=spec.train.step_size,
            local_steps=spec.train.local_steps or (None if spec.train.local_epochs else 1),
            local_epochs=spec.train.local_epochs,
            protocol=Protocol.of(spec.train, spec.data, round_),
            defenses=[d.model_dump(mode="json") for d in spec.defenses],
        )


def _told_alike(public: Public) -> dict[str, Any]:
    """What is public, in the words by which two of them are compared: where a checkpoint lay and
    what a defense is called in tables is no part of it."""
    model = ModelSpec.model_validate(public.architecture)
    defenses = [Component.model_validate(defense) for defense in public.defenses]
    return {
        **{name: getattr(public, name) for name in Public.__dataclass_fields__},
        "architecture": {"name": model.name, "options": model.options},
        "defenses": [{"name": defense.name, **defense.params} for defense in defenses],
    }


@dataclass(frozen=True)
class Observation:
    """What the server has of one client in one round."""

    round: int
    client: int
    weights: dict[str, Tensor]  # the state dict sent to this client: parameters and buffers
    update: Update
    public: Public
    checksum: str = ""  # of what came back; a result names by it what it was made from
    chosen: Chosen | None = None  # why the weights are not those of the round, if they are not
    cohort: tuple[int, ...] = ()  # who masked their uploads together, where they did
    stayed: tuple[int, ...] = ()  # the clients whose uploads the update is the mean of, if so

    @property
    def summed(self) -> int:
        """How many uploads the update is the mean of."""
        return max(1, len(self.stayed))

    @property
    def name(self) -> str:
        return observation_name(self.round, self.client)

    @property
    def pictures(self) -> int:
        """How many pictures can stand behind the update, by all that is public."""
        return most_pictures(self.public, self.update.num_examples)


def most_pictures(public: Public, num_examples: int) -> int:
    """Those of one batch behind a gradient, of every step behind a delta; where a client goes over
    all it has, as many as it says it learned from in an epoch, or in all epochs where each shows a
    picture anew (augmented)."""
    batch = public.batch_size
    match public.protocol.upload:
        case Upload.GRADIENT:
            return batch
        case Upload.DELTA:
            if public.local_epochs:
                epochs = 1 if public.protocol.augment else public.local_epochs
                return max(batch, -(-num_examples // epochs))
            return batch * (public.local_steps or 1)
        case other:
            assert_never(other)


def write_weights(
    root: Path,
    round_: int,
    weights: Mapping[str, Tensor],
    memory: Mapping[str, Any] | None = None,
    spec: str | None = None,
) -> None:
    """What the server sends in this round, kept once for all its clients, and what its manoeuvre
    remembered when the round began. It names its round and, by its digest, the ``spec`` of its run:
    weights of other rounds look the same."""
    path = weights_path(root, round_)
    save_tensors(path, weights)
    about: dict[str, Any] = {"format": FORMAT, "round": round_, "checksum": checksum(weights)}
    about |= {"spec": spec} if spec is not None else {}
    write_json(path.with_suffix(".json"), {**about, "memory": memory} if memory else about)


def write_observation(
    root: Path,
    round_: int,
    client: int,
    update: Update,
    public: Public,
    chosen: Chosen | None = None,
    places: Places | None = None,
    cohort: Sequence[int] = (),
) -> None:
    """Keep one reply; of a client that was sent other weights than the round's, also where they
    are, and where a manoeuvre chose them, why; of one that masked it with a ``cohort``, with whom.
    """
    path = observation_path(root, round_, client)
    tensors = as_kept(update)
    save_tensors(path, tensors)
    about = {
        "format": FORMAT,
        "round": round_,
        "client": client,
        "kind": update.kind,
        "num_examples": update.num_examples,
        "loss": update.loss,
        "finite": update.is_finite(),
        **asdict(public),
        "checksum": checksum(tensors),
    }
    if cohort:
        about["cohort"] = list(cohort)
    if chosen is not None:
        about["chosen"] = chosen.model_dump(mode="json")
    if chosen is not None or places is not None:
        about["sent"] = (places or Places()).model_dump(mode="json")
    write_json(path.with_suffix(".json"), about)


def as_kept(update: Update) -> dict[str, Tensor]:
    """What came back, under the names that it has in a file."""
    tensors = {f"{_UPDATE}{name}": tensor for name, tensor in update.tensors.items()}
    return tensors | {f"{_BUFFER}{name}": tensor for name, tensor in update.buffers.items()}


def update_checksum(update: Update) -> str:
    """The checksum that the observation of this update will have: a client binds its truth to what
    it sent by it."""
    return checksum(as_kept(update))


class _About(BaseModel):
    """What the JSON of an observation must hold to be one."""

    round: Positive
    client: Annotated[int, Field(ge=0)]
    kind: Upload
    num_examples: Annotated[int, Field(ge=0)]
    loss: float
    checksum: str
    architecture: ModelSpec
    num_classes: Positive
    image_size: Positive
    batch_size: Positive
    local_steps: Positive | None
    local_epochs: Positive | None
    protocol: Protocol
    defenses: list[Component]
    chosen: Chosen | None = None
    sent: Places = Places()
    cohort: list[Annotated[int, Field(ge=0)]] = []


def read_observation(path: Path) -> Observation:
    """Load an observation by its ``.json`` or ``.safetensors`` path; damage is an error."""
    about, public, tensors = _read(path)
    _refuse_misplaced(path, about)
    update = _update_of(about, tensors)
    weights = read_weights(path.parent / paths.WEIGHTS, about.round)
    sent = read_sent(path.parent, about.sent)
    if sent.keys() - weights.keys():
        raise ObservationError(f"the observation '{path}' names tensors that no model has.")
    return Observation(
        *(about.round, about.client, weights | sent, update, public, about.checksum),
        chosen=about.chosen,
        cohort=tuple(about.cohort),
    )


def read_reply(path: Path) -> Update:
    """What came back, with what its client says of it, and without what was sent."""
    about, _, tensors = _read(path)
    return _update_of(about, tensors)


def _update_of(about: _About, tensors: Mapping[str, Tensor]) -> Update:
    return Update(
        kind=about.kind,
        tensors=_named(_UPDATE, tensors),
        buffers=_named(_BUFFER, tensors),
        num_examples=about.num_examples,
        loss=about.loss,
    )


def read_update(path: Path) -> Update:
    """Only what came back, without what was sent; damage is an error. What a client says of it is
    not looked at: whether it makes sense is for whoever attacks it to find out."""
    about = _read_about(path.with_suffix(".json"))
    tensors = _read_tensors(path.with_suffix(".safetensors"), about)
    return Update(Upload(about["kind"]), _named(_UPDATE, tensors), _named(_BUFFER, tensors))


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one kind in a file, by their own names."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def check_observation(path: Path) -> None:
    """Raise where an observation is missing or damaged; the weights of its round, which it shares
    with others, are not checked."""
    about, _, _ = _read(path)
    _refuse_misplaced(path, about)
    read_sent(path.parent, about.sent)


def _refuse_misplaced(path: Path, about: _About) -> None:
    """Raise where an observation says that it is of another round or client than its name does."""
    try:
        named = address_of(path.absolute())
    except ObservationError:  # a name of somebody else's
        return
    if named != (about.round, about.client):
        raise MisplacedObservationError(
            f"the observation '{path}' is that of {observation_name(about.round, about.client)}."
        )


def _read(path: Path) -> tuple[_About, Public, dict[str, Tensor]]:
    about, public, raw = _read_public(path)
    return about, public, _read_tensors(path.with_suffix(".safetensors"), raw)


def _read_public(path: Path) -> tuple[_About, Public, dict[str, Any]]:
    """What the JSON of an observation says, checked, and as it is."""
    raw = _read_about(path.with_suffix(".json"))
    try:
        about = _About.model_validate(raw)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ObservationError(
            f"the observation '{path}' is damaged: its JSON lacks a valid '{where}'."
        ) from error
    checked = {key: getattr(about, key) for key in Public.__dataclass_fields__}
    as_written = {key: raw[key] for key in ("architecture", "defenses")}
    return about, Public(**{**checked, **as_written}), raw


def refuse_foreign(path: Path, spec: Spec, classes: int | None = None) -> None:
    """Raise where an observation announces another protocol than the ``spec`` of its run; the
    number of ``classes`` is compared where it is known.

    Whoever attacks or scores it believes what it announces. One that cannot be read, or is not
    there, is left to whoever reads it; what an older version did not write is at its default.
    """
    try:
        about, public, _ = _read_public(path)
    except ObservationError:
        return
    _refuse_foreign_choice(path, about.round, about.chosen, spec)
    if about.cohort and about.cohort != spec.cohort(about.round):
        raise ForeignObservationError(
            f"the observation '{path}' is not of this run: its cohort is {brief(about.cohort)}, "
            f"not {brief(spec.cohort(about.round))} as the run's spec says."
        )
    found = _told_alike(public)
    expected = _told_alike(Public.of(spec, classes or public.num_classes, about.round))
    for name, value in expected.items():
        if found[name] != value:
            raise ForeignObservationError(
                f"the observation '{path}' is not of this run: its {name} is "
                f"{brief(found[name])}, not {brief(value)} as the run's spec says."
            )


def _refuse_foreign_choice(path: Path, round_: int, chosen: Chosen | None, spec: Spec) -> None:
    """Raise where weights were chosen by another server than that of the spec."""
    own = spec.server.manoeuvre
    name = None if chosen is None else chosen.manoeuvre.get("name")
    if (chosen is not None) != (round_ in spec.tampered_rounds) and own is not None:
        sent = "its weights are chosen" if chosen is not None else "its weights are the round's"
        raise ForeignObservationError(
            f"the observation '{path}' is not of this run: {sent}, and round {round_} of the run's "
            f"spec is {'tampered with' if chosen is None else 'honest'}."
        )
    if chosen is not None and (own is None or Component.model_validate(chosen.manoeuvre) != own):
        raise ForeignObservationError(
            f"the observation '{path}' is not of this run: its weights were chosen by "
            f"{brief(name)}, and the run's spec has {brief(own and own.name)}."
        )


def read_weights(
    path: Path, round_: int | None = None, spec: str | None = None, *, nameless: bool = True
) -> dict[str, Tensor]:
    """What the server sent in a round; damage is an error, and so are weights of another ``round_``
    or of a run of another ``spec``. Those from before they named their round are taken as they lie,
    unless ``nameless`` says otherwise."""
    about = _read_about(path.with_suffix(".json"))
    named = about.get("round")
    if round_ is not None and (named != round_ if named is not None else not nameless):
        whose = "do not say which round they are of" if named is None else f"are of round {named}"
        raise MisplacedObservationError(f"the weights '{path}' {whose}, not of round {round_}.")
    if spec is not None and about.get("spec", spec) != spec:
        raise ForeignObservationError(f"the weights '{path}' are not of this run.")
    return _read_tensors(path, about)


def remembered(path: Path) -> dict[str, Any]:
    """What a manoeuvre remembered when the round of these weights began."""
    memory = _read_about(path.with_suffix(".json")).get("memory")
    return dict(memory) if isinstance(memory, dict) else {}


def chosen_in(path: Path) -> Chosen | None:
    """What an observation says of its weights, by its JSON alone; None where they are the round's,
    or where it cannot be read."""
    try:
        return _read_public(path)[0].chosen
    except ObservationError:
        return None


def was_sent_other(path: Path) -> bool | None:
    """Whether the client of an observation received other weights than the round's; None where
    there is no observation to tell."""
    try:
        return bool(_read_public(path.with_suffix(".json"))[0].sent.files)
    except (ObservationError, OSError):
        return None


def recorded_files(path: Path) -> list[Path]:
    """Every file that an observation is read from."""
    weights = path.parent / paths.WEIGHTS
    shared = [weights, weights.with_suffix(".json")]
    try:
        sent = files_of(path.parent, _read_public(path)[0].sent)
    except ObservationError:
        sent = []
    return [path.with_suffix(".json"), path.with_suffix(".safetensors"), *shared, *sent]


def is_finite(path: Path) -> bool:
    """Whether the update is worth attacking; a damaged one is left for the attack to report."""
    try:
        return bool(_read_about(path).get("finite", True))
    except ObservationError:
        return True


def recorded_checksum(path: Path) -> str | None:
    """What the JSON of an observation says of its tensors; None where it cannot be read."""
    try:
        return _read_about(path).get("checksum")
    except ObservationError:
        return None


def recorded_cohort(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The defenses that an observation announces and who masked their uploads together, by its JSON
    alone; nothing where it cannot be read."""
    try:
        about, public, _ = _read_public(path)
    except ObservationError:
        return [], []
    return public.defenses, about.cohort


def recorded_classes(path: Path) -> int | None:
    """How many classes there are; None where the record does not tell."""
    try:
        classes = _read_about(path).get("num_classes")
    except ObservationError:
        return None
    return classes if isinstance(classes, int) and classes > 0 else None


def recorded_pictures(path: Path) -> int | None:
    """How many pictures can stand behind an observation, by its JSON alone; None where it cannot be
    read."""
    try:
        about, public, _ = _read_public(path)
    except ObservationError:
        return None
    return most_pictures(public, about.num_examples)


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = read_json(path)
    except FileNotFoundError:
        raise ObservationError(f"there is no observation '{path}'.") from None
    except DamagedError as error:
        raise ObservationError(f"the observation {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ObservationError(f"the observation '{path}' has a format this version cannot read.")
    return about


def _read_tensors(path: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        tensors, _ = read_tensors(path)
    except FileNotFoundError:
        raise ObservationError(f"the observation '{path}' is missing.") from None
    except DamagedError as error:
        raise ObservationError(f"the observation {error}") from error
    if checksum(tensors) != about.get("checksum"):
        raise ObservationError(
            f"the observation '{path}' is damaged: its checksum is not the recorded one."
        )
    return tensors
