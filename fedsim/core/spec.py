"""Spec: one experiment, as YAML plus dotted overrides, checked before anything runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, assert_never

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsim.core.documents import MOST_BYTES, read_yaml
from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.text import brief

Positive = Annotated[int, Field(ge=1)]
Deviation = Annotated[float, Field(gt=0)]
Colour = tuple[float, float, float]
Spread = Annotated[float, Field(gt=0)]  # something is divided by it

BASELINE = "prior_only"  # the attack that never sees the update
_BASELINE_PATHS = ("fedsim.attacks.prior_only:PriorOnly", "attacks.prior_only:PriorOnly")
_TITLE = re.compile(r"[\w .+-]{1,200}")
_TITLE_BYTES = 200  # of a folder's name, which has at most 255


class Upload(StrEnum):
    """What a client uploads. Code that tells the kinds apart covers every one (`assert_never`)."""

    GRADIENT = "gradient"  # of one batch
    DELTA = "delta"  # how the weights changed over the local steps

    @property
    def sign(self) -> float:
        """Of the upload relative to the gradient behind it: a descent step goes against that."""
        match self:
            case Upload.GRADIENT:
                return 1.0
            case Upload.DELTA:
                return -1.0
            case other:
                assert_never(other)


class _Section(BaseModel):
    # A number that is none, or endless, would be found out only by what is computed with it.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PartitionSpec(_Section):
    """How the samples are spread over the clients (flwr-datasets' partitioners)."""

    kind: Literal["iid", "dirichlet", "pathological", "shard", "natural"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.5  # dirichlet: concentration
    classes_per_client: Positive = 2  # pathological
    shards_per_client: Positive = 2  # shard


class DataSpec(_Section):
    """Which pictures, at which size, on how many clients."""

    name: str = "photos"
    path: str | None = None
    label: str | None = None  # what is learned, where a data set has more than one; null: its first
    image_size: Annotated[int, Field(ge=8)] = 32
    clients: Positive = 8
    partition: PartitionSpec = PartitionSpec()
    mean: Colour = (0.5, 0.5, 0.5)
    std: Annotated[
        tuple[Spread, Spread, Spread], Field(description="per channel, after scaling to [0, 1]")
    ] = (0.5, 0.5, 0.5)


class ModelSpec(_Section):
    """Any timm classifier by name; ``options`` go to its constructor. ``init`` classic: linear
    layers and convolutions as torch begins them, embeddings from N(0, 1), as older ViT code does
    (and the victims of APRIL's paper); timm's are far smaller."""

    name: str = "vit_tiny_patch16_224"
    options: dict[str, Any] = {}
    init: Literal["timm", "classic"] = "timm"
    pretrained: bool = False
    checkpoint: str | None = None

    @model_validator(mode="after")
    def _begins_once(self) -> ModelSpec:
        if self.init != "timm" and self.pretrained:
            raise ValueError("init: classic begins a model afresh, which pretrained: true does not")
        return self


class TrainSpec(_Section):
    """The federated protocol: what the server announces and every client follows."""

    rounds: Positive = 1
    clients_per_round: Positive | None = None  # null: every client
    batch_size: Positive = 1
    local_steps: Positive | None = None  # null: one, unless local_epochs says otherwise
    local_epochs: Positive | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None  # global l2 norm of each gradient
    upload: Upload = Upload.GRADIENT
    batchnorm: Literal["shared", "local"] = "shared"
    mode: Literal["train", "eval"] = "train"
    strategy: str = "FedAvg"
    strategy_options: dict[str, Any] = {}
    timeout: Annotated[float, Field(gt=0)] = 3600.0  # seconds a cohort is waited for, at most
    # Once half of it has answered: so many times as long as that half took; null: the timeout.
    patience: Annotated[float, Field(ge=1)] | None = 10.0
    max_norm: Annotated[float, Field(gt=0)] | None = None  # of an upload; null: very far
    max_examples: Positive | None = None  # behind an upload; null: what the protocol gives
    evaluate: bool = True

    @model_validator(mode="after")
    def _one_way_to_count_steps(self) -> TrainSpec:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("give local_steps or local_epochs, not both")
        if self.upload is Upload.GRADIENT:
            if (self.local_steps or 1) * (self.local_epochs or 1) > 1:
                raise ValueError("a gradient upload is one step; use upload: delta for several")
            if self.optimizer != "sgd" or self.momentum:
                raise ValueError("a gradient upload has no local optimizer; use upload: delta")
        return self


class Component(BaseModel):
    """An attack or a defense: its name, and parameters that its dataclass checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    title: str | None = None

    @model_validator(mode="after")
    def _names_a_folder(self) -> Component:
        """What it is called in tables is also the folder of its results."""
        title = self.title
        if title is None:
            if self.short_name in ("", ".", "..") or set(self.short_name) & set("/\\\0"):
                raise ValueError(f"{brief(self.name)} is no name: results need a folder of it")
        elif not _is_title(title):
            raise ValueError(
                f"the title {brief(title)} is not a short one of letters, digits, spaces "
                f"and _ . + -"
            )
        elif title == BASELINE and not self.is_baseline:
            raise ValueError(f"the title '{BASELINE}' is that of the baseline; choose another")
        return self

    @property
    def short_name(self) -> str:
        """The name in tables: the title, or the name; of an import path, the class."""
        return self.title or self.name.rpartition(":")[2]

    @property
    def is_baseline(self) -> bool:
        """Whether it is the attack that never sees the update, whatever it is called."""
        return self.name == BASELINE or self.name in _BASELINE_PATHS

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _is_title(text: str) -> bool:
    """Whether a title can be a folder's name on any disk, and no other folder than its own."""
    safe = _TITLE.fullmatch(text) is not None and text.strip(" .+-") != ""
    return safe and len(text.encode()) <= _TITLE_BYTES


class SurrogateSpec(_Section):
    """Data of the attacker's own (threat D, E and G): never the clients' shards."""

    name: str = "imagefolder"
    path: str | None = None


class PriorSpec(_Section):
    """A pretrained network of the attacker's own (threat D, E and G)."""

    name: str = "efficientnet_lite0"  # from its package, offline; or any timm name, from the hub
    options: dict[str, Any] = {}
    checkpoint: str | None = None
    # How its pictures were normalised, where timm's own numbers of that name do not hold.
    mean: tuple[float, float, float] | None = None
    std: tuple[Deviation, Deviation, Deviation] | None = None


class GeneratorSpec(_Section):
    """A trained generator of the attacker's own (threat D, E and G): a file that `fedsim generator
    train` or GIML wrote, or any module by import path with its safetensors file."""

    checkpoint: str
    name: str | None = None  # null: as the file says; or package.module:Class
    options: dict[str, Any] = {}  # of a class by import path


class ThreatSpec(_Section):
    """What the attacker may know: a letter of the table in ``fedsim.core.knowledge``."""

    model: Literal["A", "B", "C", "D", "E", "F", "G", "H"] = "C"
    surrogate: SurrogateSpec | None = None
    prior: PriorSpec | None = None
    generator: GeneratorSpec | None = None
    withhold: list[str] = []  # fields that the letter grants and this attacker lacks
    oracle_labels: bool = False


class ServerSpec(_Section):
    """What an active server does (threats F, G and H): which weights it sends, and what becomes of
    the replies to them.

    ``aggregate``: ``discard`` keeps tampered replies out of the global model, ``include`` lets them
    in, and after ``honest_copy`` the same clients are asked once more, honestly, in the next round.
    """

    manoeuvre: Component | None = None
    aggregate: Literal["discard", "include", "honest_copy"] = "discard"
    rounds: list[Positive] | None = None  # that it tampers with; null: all, or every other one
    clients: list[Annotated[int, Field(ge=0)]] | None = None  # it asks in every round (threat H)

    @model_validator(mode="after")
    def _copies_have_room(self) -> ServerSpec:
        rounds = sorted(set(self.rounds or []))
        if self.aggregate == "honest_copy" and any(r + 1 in rounds for r in rounds):
            raise ValueError("honest_copy takes the round after a tampered one: leave it free")
        if self.manoeuvre is None and (self.rounds or self.clients):
            raise ValueError("server.rounds and server.clients are of a manoeuvre: name one")
        return self


class AuditSpec(_Section):
    """Which observations are attacked, and how often."""

    rounds: list[Positive] | None = None  # null: every round
    victims: Positive | None = None  # null: every observation of those rounds
    trials: Positive = 1
    gallery: Annotated[int, Field(ge=0)] = 500  # pictures to tell a victim's own from; 0: none
    features: Literal["prior", "pixels"] = "prior"  # where its nearest neighbour is looked for


class EngineSpec(_Section):
    """Where it runs."""

    kind: Literal["ray", "inline"] = "ray"
    address: str | None = None
    attack_workers: Positive = 1
    retries: Annotated[int, Field(ge=0)] = 1
    # Seconds: that a job may go without a step it reports, and that it may take in all (null: a
    # day, or ten minutes for each step it announces). After that it is ended, told and tried again.
    job_silence: Annotated[float, Field(gt=0)] = 3600.0
    job_timeout: Annotated[float, Field(gt=0)] | None = None
    device: str = "auto"
    client_gpus: Annotated[float, Field(ge=0)] = 0.0  # share of a GPU each client takes
    # Of attack workers, a share or a whole number; null: all GPUs, evenly.
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    cpus: Positive | None = None  # of a local Ray; null: all

    @model_validator(mode="after")
    def _gpus_as_ray_counts_them(self) -> EngineSpec:
        wanted = self.gpus_per_worker
        if wanted is not None and wanted > 1 and wanted % 1:
            raise ValueError(f"gpus_per_worker is {wanted:g}; above 1 it must be a whole number")
        return self


class Spec(_Section):
    """One experiment."""

    name: str = "audit"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # as random generators take them
    data: DataSpec = DataSpec()
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    defenses: list[Component] = []
    guards: list[Component] = []  # what clients check of the weights they receive
    threat: ThreatSpec = ThreatSpec()
    server: ServerSpec = ServerSpec()
    attacks: list[Component] = [Component(name="patch_solve")]
    audit: AuditSpec = AuditSpec()
    engine: EngineSpec = EngineSpec()

    @model_validator(mode="before")
    @classmethod
    def _a_letter_is_a_threat(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("threat"), str):
            return {**value, "threat": {"model": value["threat"]}}
        return value

    @model_validator(mode="after")
    def _sections_agree(self) -> Spec:
        chosen = self.train.clients_per_round
        if chosen is not None and chosen > self.data.clients:
            raise ValueError(
                f"train.clients_per_round is {chosen} but data.clients is {self.data.clients}"
            )
        late = [r for r in self.audit.rounds or [] if r > self.train.rounds]
        if late:
            raise ValueError(f"audit.rounds has {late[0]} but train.rounds is {self.train.rounds}")
        self._server_agrees()
        return self

    def _server_agrees(self) -> None:
        late = [r for r in self.server.rounds or [] if r > self.train.rounds]
        if late:
            raise ValueError(f"server.rounds has {late[0]} but train.rounds is {self.train.rounds}")
        asked = self.server.clients
        if asked is None:
            return
        unknown = [client for client in asked if client >= self.data.clients]
        if unknown:
            raise ValueError(
                f"server.clients has {unknown[0]} but data.clients is {self.data.clients}"
            )
        if not asked or len(set(asked)) > self.cohort_size:
            raise ValueError(
                f"server.clients names {len(set(asked))} and {self.cohort_size} are asked in a "
                f"round"
            )

    @property
    def cohort_size(self) -> int:
        """Clients that train in one round."""
        return self.train.clients_per_round or self.data.clients

    def cohort(self, round_: int) -> list[int]:
        """The clients that train in a round: by seed and round alone, sorted; those whom the server
        asks for always among them. An honest copy of a round has that round's."""
        if self.is_copy(round_):
            return self.cohort(round_ - 1)
        coin = np.random.default_rng([self.seed, 7, round_])
        chosen = [int(c) for c in coin.choice(self.data.clients, self.cohort_size, replace=False)]
        asked = sorted(set(self.server.clients or []))
        others = [client for client in chosen if client not in asked]
        return sorted([*asked, *others[: self.cohort_size - len(asked)]])

    @property
    def tampered_rounds(self) -> list[int]:
        """The rounds in which the server sends weights of its own choice."""
        if self.server.manoeuvre is None:
            return []
        step = 2 if self.server.aggregate == "honest_copy" else 1
        return sorted(set(self.server.rounds or range(1, self.train.rounds + 1, step)))

    def is_copy(self, round_: int) -> bool:
        """Whether a round is the honest copy of the tampered one before it."""
        copies = self.server.aggregate == "honest_copy"
        return copies and round_ - 1 in self.tampered_rounds

    @property
    def audited_rounds(self) -> list[int]:
        """The rounds whose observations are kept and attacked."""
        return sorted(set(self.audit.rounds or range(1, self.train.rounds + 1)))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def digest(self) -> str:
        """A short hash of what the experiment *is*: where it runs does not count, and neither does
        what is at its default, so that a run can still be opened when specs have grown a key."""
        content = self.model_dump(mode="json", exclude={"engine", "name"}, exclude_defaults=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def load_spec(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Spec:
    """Read a YAML file (or a mapping), apply ``key.sub=value`` overrides, validate."""
    where = "the spec" if isinstance(source, Mapping) else str(source)
    content = read_content(source, overrides)
    try:
        spec = _absolute(Spec.model_validate(content))
    except ValidationError as error:
        raise SpecError(f"{where}: {_explain(error)}") from error
    except RecursionError as error:
        raise SpecError(f"{where}: it is nested too deeply.") from error
    try:
        spec.to_yaml(), spec.digest()  # what cannot be written down cannot be resumed
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: a value in it is none that YAML can hold.") from error
    return spec


def written_digest(path: Path) -> str:
    """The digest of a spec file with its paths as they stand in it: a run from before one of them
    was made absolute was named by that."""
    return Spec.model_validate(read_content(path)).digest()


def read_content(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """A YAML file (or a mapping) with its overrides applied, not validated yet."""
    content = dict(source) if isinstance(source, Mapping) else _read_yaml(Path(source))
    for override in overrides:
        _apply(content, override)
    return content


def _absolute(spec: Spec) -> Spec:
    """Paths are given relative to this process, but read by other processes and by later runs."""

    def fixed(path: str | None) -> str | None:
        return path and str(Path(os.path.expanduser(path)).absolute())

    data = spec.data.model_copy(update={"path": fixed(spec.data.path)})
    model = spec.model.model_copy(update={"checkpoint": fixed(spec.model.checkpoint)})
    threat = spec.threat
    changed: dict[str, Any] = {}
    if threat.surrogate:
        path = fixed(threat.surrogate.path)
        changed["surrogate"] = threat.surrogate.model_copy(update={"path": path})
    if threat.prior:
        path = fixed(threat.prior.checkpoint)
        changed["prior"] = threat.prior.model_copy(update={"checkpoint": path})
    if threat.generator:
        path = fixed(threat.generator.checkpoint)
        changed["generator"] = threat.generator.model_copy(update={"checkpoint": path})
    threat = threat.model_copy(update=changed)
    return spec.model_copy(update={"data": data, "model": model, "threat": threat})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"there is no spec file '{path}'.") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read as text: {error}.") from error
    content = read_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SpecError(f"{path}: a spec is a mapping of sections, not a {_kind(content)}.")
    return content


def _apply(content: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is YAML."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise SpecError(f"'{override}' is not an override; write key.sub=value.")
    value = read_value(key, text)
    node = content
    for part in parts[:-1]:
        child = node.get(part)
        if part == "threat" and isinstance(child, str):
            child = {"model": child}
        elif child is None:
            child = {}
        elif not isinstance(child, dict):
            raise SpecError(f"override '{key}': '{part}' is a {_kind(child)}, not a section.")
        node[part] = dict(child)
        node = node[part]
    node[parts[-1]] = value


def read_value(key: str, text: str) -> Any:
    """What follows ``key=`` on a command line, read as YAML."""
    return read_yaml(text, f"override '{key}={text:.60}'")


def _explain(error: ValidationError) -> str:
    """The first problem pydantic found, as one sentence a user can act on."""
    first = error.errors()[0]
    location = [part for part in first["loc"] if part != "function-after"]
    key = ".".join(str(part) for part in location)
    more = f" ({error.error_count() - 1} more after this one)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        valid = _keys_at(location[:-1])
        hint = did_you_mean(str(location[-1]), valid)
        return f"unknown key '{key}'{hint}; allowed here: {', '.join(valid)}.{more}"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return f"{key + ': ' if key else ''}{message}.{more}"
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] in ("literal_error", "enum"):
        allowed = str(first["ctx"]["expected"])
        word = first["input"] if isinstance(first["input"], str) else ""
        hint = did_you_mean(word, [a.strip(" '") for a in allowed.replace(" or ", ",").split(",")])
        message = f"must be one of {allowed}{hint}"
    return f"{key}: {message}, not {brief(first['input'])}.{more}"


def _keys_at(location: Iterable[Any]) -> list[str]:
    """The keys a section allows, found by walking the models along ``location``."""
    model: type[BaseModel] = Spec
    for part in location:
        if not isinstance(part, str) or part not in model.model_fields:
            continue
        model = _section_of(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for inner in typing.get_args(annotation):
            if (section := _section_of(inner)) is not None:
                return section
    return None


def _kind(value: Any) -> str:
    names = {"list": "list", "str": "text", "dict": "mapping"}
    kind = type(value).__name__
    return names.get(kind, kind)
