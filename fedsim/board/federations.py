"""Federations: which runs can be compared. One section of the board is one of them: the same model,
data, batch size, protocol, audited rounds and threat; only defenses, guards and seeds differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fedsim.core.spec import Component, Spec, Upload
from fedsim.core.text import in_brief

UNDEFENDED = "none"
# Where a federation runs and how long it waits changes no update.
_OF_NO_ACCOUNT = {"evaluate", "timeout", "patience", "max_norm", "max_examples"}


@dataclass(frozen=True)
class Federation:
    """One section of the board."""

    key: str
    model: str
    data: str
    batch: int
    protocol: str
    letter: str
    threat: str

    @property
    def title(self) -> str:
        return f"{self.model} on {self.data}, batch {self.batch}, threat {self.threat}"


def federation_of(spec: Spec) -> Federation:
    """The section that a run of this spec stands in."""
    content = spec.model_dump(mode="json")
    train = {k: v for k, v in content["train"].items() if k not in _OF_NO_ACCOUNT}
    same = {name: content[name] for name in ("data", "model", "threat", "server", "captured")}
    return Federation(
        key=_hash({**same, "train": train, "rounds": spec.audited_rounds}),
        model=_model(spec),
        data=_data(spec),
        batch=spec.train.step_size,
        protocol=_protocol(spec),
        letter=spec.threat.model,
        threat=_threat(spec),
    )


def defense_of(spec: Spec) -> tuple[str, str, str]:
    """What stands against the attacker: its names, how strong it is, and a key that no other has.
    Guards are part of it: one that refuses protects."""
    components = [*spec.defenses, *spec.guards]
    names = [_name(component) for component in components]
    strengths = [in_brief(component.params) for component in components]
    told = [[{"name": c.name, **c.params} for c in group] for group in (spec.defenses, spec.guards)]
    strength = " + ".join(words or "as it is" for words in strengths) if any(strengths) else ""
    return " + ".join(names) or UNDEFENDED, strength, _hash(told)


def _name(component: Component) -> str:
    return component.name.rpartition(":")[2]


def _model(spec: Spec) -> str:
    model, words = spec.model, []
    words += [f"{key} {value}" for key, value in model.options.items()]
    words += ["pretrained"] if model.pretrained else []
    words += ["a checkpoint"] if model.checkpoint else []
    words += [model.init] if model.init != "timm" else []
    return f"{model.name} ({', '.join(words)})" if words else model.name


def _data(spec: Spec) -> str:
    """Without the path, which is its owner's own; a mark tells two of the same name apart."""
    data = spec.data
    name = "pictures of an app" if spec.captured is not None else data.name
    mark = f" {_hash(PurePath(data.path).as_posix())[:4]}" if data.path else ""
    kind = data.partition.kind
    dealt = "" if kind == "iid" or spec.captured is not None else f", dealt {kind}"
    return f"{name}{mark} at {data.image_size} px{dealt}"


def _protocol(spec: Spec) -> str:
    train = spec.train
    if train.upload is Upload.GRADIENT:
        words = "one gradient"
    elif train.local_epochs:
        words = f"{train.local_epochs} local {'epoch' if train.local_epochs == 1 else 'epochs'}"
    else:
        steps = train.local_steps or 1
        words = f"{steps} local {'step' if steps == 1 else 'steps'}"
    words += f", {train.optimizer}, learning rate {train.lr:g}"
    words += "" if train.trainable == "all" else f", a part of the model ({train.trainable})"
    words += "" if train.precision == "float32" else f", {train.precision}"
    words += f"; {spec.data.clients} clients, {spec.cohort_size} in a round"
    rounds = spec.audited_rounds
    shown = ", ".join(map(str, rounds[:4])) + (" ..." if len(rounds) > 4 else "")
    return f"{words}; attacked in {'round' if len(rounds) == 1 else 'rounds'} {shown}"


def _threat(spec: Spec) -> str:
    threat = spec.threat
    words: list[str] = [threat.model]
    words += [f"with surrogate pictures ({threat.surrogate.name})"] if threat.surrogate else []
    words += [f"without {', '.join(threat.withhold)}"] if threat.withhold else []
    words += ["with the true labels"] if threat.oracle_labels else []
    if spec.server.manoeuvre is not None:
        words += [f"whose server does {_name(spec.server.manoeuvre)}"]
    return " ".join(words)


def _hash(content: Any) -> str:
    words = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest()[:12]
