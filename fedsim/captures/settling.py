"""Settling: a capture becomes a run, once all is known that an observation announces.

Captured tensors stay as they are, but for names that only the model knows. A declaration may be
made, or mended, when the audit asks: then the observations announce that, and what was made from
the old one is thrown away.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsim.captures.defaults import default_attacks
from fedsim.captures.flower_defenses import KEY_CLIPPING_NORM, clipping, contradiction
from fedsim.captures.inference import Inferred, infer, infer_batch
from fedsim.captures.log import (
    Head,
    Messages,
    Reply,
    is_capture,
    read_head,
    read_messages,
    write_head,
)
from fedsim.captures.names import Names, names_in
from fedsim.captures.part import declared_part, infer_part, surveyed, tell_frozen
from fedsim.captures.session import signed
from fedsim.captures.unusable import leave_out
from fedsim.core.errors import FedsimError, ModelError, RunError, SpecError
from fedsim.core.factories import is_import_path
from fedsim.core.files import read_tensors
from fedsim.core.keyring import Keyring
from fedsim.core.learning import Update
from fedsim.core.observation import Public, write_observation, write_weights
from fedsim.core.run import Run, observation_path, paths, weights_path
from fedsim.core.run.record import Record, write_record
from fedsim.core.spec import Spec, Upload, load_spec, read_content
from fedsim.core.trainable import restricted
from fedsim.defenses.applied import announced
from fedsim.federation.checkpoint import Checkpoint, write_checkpoint

# Sections that say what the federation did: they are remembered; others are of one audit alone.
ABOUT = ("data", "model", "train", "defenses")
MOST_VICTIMS = 8  # of an audit that names no attacks

MADE = (
    *(paths.RECONSTRUCTIONS, paths.LEARNED, paths.CANARIES, paths.SCORES, "scores.parquet"),
    *(paths.SUMMARY, paths.REPORT, paths.REDACTED_REPORT, paths.GRID),
)


@dataclass(frozen=True)
class Wanted:
    """What an audit asks for, beside what the capture knows: sections of a spec."""

    sections: dict[str, Any]

    @classmethod
    def of(cls, source: Any = None, overrides: Iterable[str] = ()) -> Wanted:
        return cls(read_content(source or {}, overrides))


def own_word(run: Run) -> bool:
    """Whether this user captured the run: then the code that it names is the user's own."""
    head = read_head(run.root)
    try:
        key = Keyring(run.vault).present()
    except FedsimError:
        return False
    return key is not None and bool(head.signature) and key.sign(*signed(head)) == head.signature


def find_app(run: Run) -> None:
    """Let the app's modules be found where they lay when it was captured."""
    app = read_head(run.root).app
    if app and app not in sys.path and Path(app).is_dir():
        sys.path.append(app)


def copied(run: Run, output: Path) -> Run:
    """The capture in another directory: files get a second name there, and are replaced, never
    changed. One that holds something else is an error."""
    taken = (paths.CAPTURE, paths.MESSAGES, paths.EVENTS)
    try:
        if output.is_dir() and any(output.iterdir()):
            if not is_capture(output) or read_head(output).began != read_head(run.root).began:
                raise RunError(f"'{output}' holds something else; choose another directory.")
            return Run(output)
        output.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run.observations, output / paths.OBSERVATIONS, copy_function=_link)
        for name in taken:
            if (run.root / name).is_file():
                shutil.copy2(run.root / name, output / name)
    except OSError as error:
        raise RunError(f"'{output}' cannot be written: {error.strerror or error}.") from error
    return Run(output)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def settle(run: Run, wanted: Wanted) -> Spec:
    """The spec of a captured run, with everything in the directory as it says. What was neither
    declared nor can be told is asked for by name."""
    head = read_head(run.root)
    rounds, damaged = read_messages(run.root)
    if damaged:
        run.note("damaged", f"{damaged} rounds of {paths.MESSAGES} are damaged and left out")
    leave_out(run, rounds)
    if not any(reply.kept for messages in rounds for reply in messages.replies):
        whys = [r.why for messages in rounds for r in messages.replies if r.why]
        raise RunError(
            f"'{run.root}' holds no update: {whys[0] if whys else 'no client answered'}."
        )
    rounds = _numbered(rounds)
    content = _content(run, head, wanted, rounds)
    found = infer(content["train"], [messages for messages in rounds if messages.replies])
    classes = _classes(content.pop("classes", None) or head.classes)
    model = _model(content, classes, run)
    names = names_in(run, head, model, rounds)
    seen = surveyed(run, model, rounds, names)
    infer_batch(found, [r.examples for m in rounds for r in m.replies if r.kept], seen.rank)
    if found.missing:
        raise SpecError(
            f"the server of '{run.root}' cannot see how its clients train: declare "
            f"{', '.join(found.missing)}, here as key=value or to fedsim.capture."
        )
    names = declared_part(run, content, model, names, seen)
    infer_part(found, model, names, seen)
    for words in found.words:
        run.note("inferred", words)
    tell_frozen(run, names, seen)
    if names.statistics and not seen.statistics:
        found.train.setdefault("batchnorm", "local")
    spec = _spec(content, found, rounds, classes, model)
    _write(run, spec, classes, rounds, replace(names, trained=names.trained & seen.moved), head)
    head.settled = {"digest": spec.digest(), "of": _identity(spec)}
    write_head(run.root, head)
    return spec


def _content(run: Run, head: Head, wanted: Wanted, rounds: Sequence[Messages]) -> dict[str, Any]:
    """The sections as they are declared: to the capture, to earlier audits, to this one."""
    content: dict[str, Any] = {
        "name": run.root.name,
        "data": {"name": "captured", **head.data},
        "model": head.model,
        "train": head.train,
        "defenses": [*head.defenses, *_clipping(head, rounds)],
    }
    said = {key: value for key, value in wanted.sections.items() if key in (*ABOUT, "classes")}
    added = _merged(head.added, said)
    if added != head.added:
        own = own_word(run)
        head.added = added
        if own:  # what was said to an audit is this user's word as well
            head.signature = Keyring(run.vault).own().sign(*signed(head))
    content = _merged(content, added)
    if head.settled and "attacks" not in wanted.sections and run.spec_path.is_file():
        before = run.spec.model_dump(mode="json")
        content |= {key: before[key] for key in ("attacks", "threat")}  # as it was asked before
    rest = {key: value for key, value in wanted.sections.items() if key not in added}
    content = {"audit": {}, "engine": {"kind": "inline"}, **content}
    content = _merged(content, rest)
    if content["data"].get("name") == "captured":
        content["audit"].setdefault("gallery", 0)
    if "image_size" not in content["data"]:
        raise SpecError(f"declare data.image_size=...: '{run.root}' does not say it.")
    if not content["model"].get("name"):
        raise SpecError(
            f"declare model.name=package.module:Net: '{run.root}' does not say what was trained."
        )
    return content


def _clipping(head: Head, rounds: Sequence[Messages]) -> list[dict[str, Any]]:
    """What a wrapper of Flower's had done to the updates, unless that was declared."""
    names = {defense.get("name") for defense in head.defenses}
    if head.clipped is None or "clipping" in names:
        return []
    norms = {m.round: norm for m in rounds if (norm := _norm(m)) is not None}
    return [clipping(norms or {1: head.clipped})]


def _norm(messages: Messages) -> float | None:
    norm = messages.config.get(KEY_CLIPPING_NORM)
    return float(norm) if isinstance(norm, int | float) and norm > 0 else None


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of both, the second's keys before the first's."""
    whole = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
        whole[key] = {**whole[key], **value} if both else value
    train = whole.get("train")
    if isinstance(train, dict) and "train" in other and isinstance(other["train"], Mapping):
        if other["train"].get("local_epochs"):
            train.pop("local_steps", None)
        elif other["train"].get("local_steps"):
            train.pop("local_epochs", None)
    return whole


def _classes(classes: Any) -> int:
    if not isinstance(classes, int) or classes < 2:
        raise SpecError("declare classes=...: the number of classes is not known.")
    return classes


def _model(content: Mapping[str, Any], classes: int, run: Run) -> nn.Module:
    """The model that was declared, as clients train it."""
    parts = {key: content[key] for key in ("data", "model", "defenses")}
    spec = load_spec({**parts, "train": {"upload": "delta"}})
    _look_for(spec.model.name, run)
    return announced(Public.of(spec, classes))


def _look_for(name: str, run: Run) -> None:
    """Say where the app's modules are looked for, if they are not found."""
    if not is_import_path(name):
        return
    if name.startswith("__main__:"):
        raise SpecError(
            f"the model '{name}' stood in the script that was run, which cannot be imported; put "
            f"it into a module and declare model.name=module:{name.partition(':')[2]}."
        )
    import importlib.util

    top = name.partition(":")[0].split(".")[0]
    folder = read_head(run.root).app
    here = Path.cwd()
    there = (here / f"{top}.py").is_file() or (here / top).is_dir()
    if importlib.util.find_spec(top) is None and not there:
        lay = f"it lay in '{folder}'" if folder else "where it lay is not known"
        raise ModelError(
            f"the model '{name}' cannot be imported from here: {lay}; call the command in the "
            f"folder of the app, or put that into PYTHONPATH."
        )


def _numbered(rounds: list[Messages]) -> list[Messages]:
    """Every round up to the last; one that is not in the log has no replies."""
    known = {messages.round: messages for messages in rounds}
    return [
        known.get(at) or Messages(round=at, began=0.0, ended=0.0, weights=False)
        for at in range(1, max(known) + 1)
    ]


def _spec(
    content: Mapping[str, Any],
    found: Inferred,
    rounds: list[Messages],
    classes: int,
    model: nn.Module,
) -> Spec:
    """The spec of the run: what is declared and inferred, and who answered."""
    cohorts = [
        [] if m.round in found.odd else sorted(r.client for r in m.replies if r.kept)
        for m in rounds
    ]
    clients = 1 + max(reply.client for m in rounds for reply in m.replies)
    counts = [r.examples for m in rounds for r in m.replies if r.kept and r.examples]
    train = {
        **found.train,
        "upload": "delta",
        "rounds": len(rounds),
        "evaluate": False,
    }
    spec = load_spec(
        {
            **content,
            **({} if "attacks" in content else {"attacks": []}),
            "data": {**content["data"], "clients": clients},
            "train": train,
            "captured": {
                "cohorts": cohorts,
                "examples": min(counts, default=None),
                "classes": classes,
            },
        }
    )
    if "attacks" in content:
        return spec
    restricted(model, spec.train.trainable, spec.train.lora)
    attacks = default_attacks(train, counts, model)
    audit = {"victims": MOST_VICTIMS, **content["audit"]}
    return load_spec({**spec.model_dump(mode="json"), "attacks": attacks, "audit": audit})


def _identity(spec: Spec) -> str:
    """A hash of what the observations announce: the attacks on them are not part of it."""
    same = {key: getattr(spec, key) for key in (*ABOUT, "captured", "threat")}
    return Spec(**same).digest()


def _write(
    run: Run,
    spec: Spec,
    classes: int,
    rounds: list[Messages],
    names: Names,
    head: Head,
) -> None:
    """Everything in the directory as the spec says."""
    if head.settled.get("of") != _identity(spec):
        for name in MADE:
            path = run.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for folder in run.vault.glob("round-*"):  # truths are bound to it anew
            shutil.rmtree(folder)
    for messages in rounds:
        if any(reply.kept for reply in messages.replies):
            _announce(run, spec, classes, messages, names, head)
    write_record(run.root, Record.of(spec, deployed=True, classes=classes))
    rows = [_row(at, messages) for at, messages in enumerate(rounds, start=1)]
    write_checkpoint(run, Checkpoint(rows, {}, {}))


def _announce(
    run: Run, spec: Spec, classes: int, messages: Messages, names: Names, head: Head
) -> None:
    """Have the observations of a round announce what the spec says."""
    public = Public.of(spec, classes, messages.round)
    sent, _ = read_tensors(weights_path(run.observations, messages.round))
    named = {names.of(name): tensor for name, tensor in sent.items()}
    for reply in messages.replies:
        if not reply.kept:
            continue
        path = observation_path(run.observations, messages.round, reply.client)
        held, _ = read_tensors(path)
        update = _update(held, spec, reply, names, named)
        if head.clipped is not None:
            _tell_unclipped(run, messages, reply, update)
        places = reply.places
        if places is not None and names.listed:
            raise ModelError("clients that are sent arrays of their own must be sent them by name.")
        write_observation(
            run.observations, messages.round, reply.client, update, public, places=places
        )
    _complete(run, messages, names, named)


def _tell_unclipped(run: Run, messages: Messages, reply: Reply, update: Update) -> None:
    """Say so where an update is longer than the norm to which it should have been clipped."""
    norm = _norm(messages)
    size = sum(float(t.double().square().sum()) for t in update.tensors.values()) ** 0.5
    words = contradiction(size, norm) if norm is not None else None
    if words is not None:
        where = {"round": messages.round, "client": reply.client}
        run.note("not_clipped", words.removesuffix("."), **where)


def _complete(run: Run, messages: Messages, names: Names, sent: Mapping[str, Tensor]) -> None:
    """Write what was sent in a round by its names, with what the model has beside it."""
    stored, _ = read_tensors(weights_path(run.observations, messages.round))
    if stored.keys() == names.state.keys():
        return
    lacking = [name for name in names.state if name not in sent]
    if lacking:
        run.note(
            "not_sent",
            f"{len(lacking)} tensors of the model are never sent ('{lacking[0]}'): they are taken "
            f"as the declared model has them when it is made",
        )
    whole = {name: sent.get(name, tensor) for name, tensor in names.state.items()}
    write_weights(run.observations, messages.round, whole)


def _update(
    held: Mapping[str, Tensor],
    spec: Spec,
    reply: Reply,
    names: Names,
    sent: Mapping[str, Tensor],
) -> Update:
    """What came back, as far as it is trained or is a BatchNorm layer's."""
    tensors, buffers = {}, {}
    for stored, tensor in held.items():
        kind, name = names.stored(stored)
        if name in names.trained and kind == "update":
            tensors[name] = tensor
        elif name in names.statistics:  # in a list, nothing said what it was
            buffers[name] = tensor if kind == "buffer" else sent[name] + tensor
    return Update(Upload.DELTA, tensors, buffers, _examples(spec, reply), reply.loss or 0.0)


def _examples(spec: Spec, reply: Reply) -> int:
    """How many examples stand behind an update, counted as often as they were learned from: an
    app's clients count those they have."""
    train = spec.train
    if train.local_steps:
        return train.local_steps * train.step_size
    held = reply.examples or 0
    seen = held - held % train.step_size if train.drop_last else held
    return seen * (train.local_epochs or 1)


def _row(number: int, messages: Messages) -> dict[str, Any]:
    kept = [reply for reply in messages.replies if reply.kept]
    losses = [reply.loss for reply in kept if reply.loss is not None]
    return {
        "round": number,
        "clients": len(kept),
        "failed": len(messages.replies) - len(kept),
        "train_loss": sum(losses) / len(losses) if losses else None,
        "test_loss": None,
        "test_accuracy": None,
        "bytes": messages.bytes,
        "seconds": round(messages.ended - messages.began, 3),
    }
