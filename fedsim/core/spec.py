"""Spec: one experiment, as YAML plus dotted overrides, checked before anything runs."""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from fedsim.core.documents import MOST_BYTES, read_yaml
from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.sections import (
    BASELINE,
    STANDARD,
    SUITES,
    AuditSpec,
    CapturedSpec,
    Component,
    DataSpec,
    EngineSpec,
    GeneratorSpec,
    ModelSpec,
    PartitionSpec,
    Positive,
    PriorSpec,
    Section,
    ServerSpec,
    SurrogateSpec,
    ThreatSpec,
    TrainSpec,
    Upload,
)
from fedsim.core.text import brief

__all__ = [
    "BASELINE",
    "AuditSpec",
    "CapturedSpec",
    "Component",
    "DataSpec",
    "EngineSpec",
    "GeneratorSpec",
    "ModelSpec",
    "PartitionSpec",
    "Positive",
    "PriorSpec",
    "ServerSpec",
    "Spec",
    "SurrogateSpec",
    "ThreatSpec",
    "TrainSpec",
    "Upload",
    "load_spec",
    "read_content",
    "read_value",
    "written_digest",
]


SUITE_CANDIDATES = 16  # of a batch's own pictures, for the membership inference of a suite


class Spec(Section):
    """One experiment."""

    name: str = "audit"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # as random generators take them
    data: DataSpec = DataSpec()
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    defenses: list[Component] = []  # noqa: RUF012 (pydantic copies defaults)
    # What clients check of the weights they receive.
    guards: list[Component] = []  # noqa: RUF012
    threat: ThreatSpec = ThreatSpec()
    server: ServerSpec = ServerSpec()
    attacks: list[Component] = [Component(name="patch_solve")]  # noqa: RUF012
    audit: AuditSpec = AuditSpec()
    engine: EngineSpec = EngineSpec()
    captured: CapturedSpec | None = None  # null: its clients are fedsim's own

    @model_validator(mode="before")
    @classmethod
    def _a_letter_is_a_threat(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("threat"), str):
            return {**value, "threat": {"model": value["threat"]}}
        return value

    @model_validator(mode="before")
    @classmethod
    def _a_suite_has_a_version(cls, value: Any) -> Any:
        """``attacks: standard`` is the newest suite, and stays that one when there are newer. An
        active server that is not told what to do fishes, and candidates are listed for its
        membership inference."""
        if not isinstance(value, Mapping) or "attacks" not in value:
            return value
        attacks = value["attacks"]
        named = [{"name": attacks}] if isinstance(attacks, str) else attacks
        if not isinstance(named, list):
            return value
        pinned = [_pinned(one) for one in named]
        changed = {**value, "attacks": pinned}
        if any(isinstance(one, Mapping) and _is_suite(one) for one in pinned):
            server = _playing(value.get("server"), value.get("threat"))
            changed |= {} if server is None else {"server": server}
            changed["threat"] = _asking(value.get("threat"))
        return changed

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
        """Clients that train in one round; of a captured federation, in its largest."""
        if self.captured is not None:
            return max((len(cohort) for cohort in self.captured.cohorts), default=1) or 1
        return self.train.clients_per_round or self.data.clients

    def cohort(self, round_: int) -> list[int]:
        """The clients that train in a round: by seed and round alone, sorted; those whom the server
        asks for always among them. An honest copy of a round has that round's; where the rounds
        were captured, they are who answered."""
        if self.captured is not None:
            known = self.captured.cohorts
            return sorted(known[round_ - 1]) if round_ <= len(known) else []
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


def _pinned(attack: Any) -> Any:
    """An entry of a spec's attacks, a suite by its version."""
    if isinstance(attack, Component):
        attack = attack.model_dump(mode="json", exclude_none=True)
    if isinstance(attack, Mapping) and attack.get("name") == STANDARD:
        return {**attack, "name": SUITES[-1]}
    return attack


def _is_suite(attack: Mapping[str, Any]) -> bool:
    return str(attack.get("name", "")).startswith(f"{STANDARD}-")


def _asking(threat: Any) -> Any:
    """A threat section with candidates for whoever tells members from others, unless it says how
    many there are."""
    if isinstance(threat, ThreatSpec):
        threat = threat.model_dump(mode="json", exclude_unset=True)
    told = {"model": threat} if isinstance(threat, str) else threat or {}
    return {"candidates": SUITE_CANDIDATES, **told} if isinstance(told, Mapping) else threat


def _playing(server: Any, threat: Any) -> Any:
    """What a suite's server does under this threat: one that may change the weights does."""
    letter = threat.get("model") if isinstance(threat, Mapping) else threat
    if isinstance(threat, ThreatSpec):
        letter = threat.model
    if letter not in ("F", "G", "H"):
        return server
    if isinstance(server, ServerSpec):
        server = server.model_dump(mode="json", exclude_defaults=True)
    told = dict(server) if isinstance(server, Mapping) else {}
    return told if told.get("manoeuvre") else {**told, "manoeuvre": {"name": "fishing"}}


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
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
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
    model: type = Spec
    for part in location:
        fields = _fields_of(model)
        if isinstance(part, str) and part in fields:
            model = _section_of(fields[part].annotation) or model
    return list(_fields_of(model))


def _fields_of(section: type) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = (
        section.model_fields if issubclass(section, BaseModel) else section.__pydantic_fields__  # type: ignore[attr-defined]
    )
    return fields


def _section_of(annotation: Any) -> type | None:
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or is_pydantic_dataclass(annotation)
    ):
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
