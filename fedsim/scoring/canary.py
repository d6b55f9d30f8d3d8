"""The canary: the true batch, replayed by the announced protocol, must give the update that was
observed. Where it does not, the attack was mis-specified, and a low score means nothing.

A canary is kept with a hash of all it was computed from, and the file of them with a hash of the
whole under the vault's key: another observation, another truth or a number written by whoever lacks
the key has it computed again. Where the vault has no key, as in older versions, it always is.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.device import resolve_device, threads
from fedsim.core.errors import DamagedError, FedsimError, ForeignTruthError
from fedsim.core.files import checksum, read_json, write_json
from fedsim.core.learning import Protocol, Update, local_update, recall
from fedsim.core.observation import (
    Observation,
    read_observation,
    recorded_checksum,
    refuse_foreign,
)
from fedsim.core.run import Run, observation_name, paths
from fedsim.core.spec import TrainSpec
from fedsim.core.vault import Truth, Vault
from fedsim.defenses.applied import announced, declared, hiding
from fedsim.scoring.undeclared import undeclared
from fedsim.scoring.unseen_noise import quiet, unexplained

# Replays differ by rounding alone: about 1e-6 on a CPU, more after many local steps.
CANARY_TOLERANCE = 1e-4

# Half of the digits leave less to compare. In `autocast` a difference in the last bit of float32
# moves what is rounded to half, and grows: measured for one step and for eight (docs/metrics.md).
_COMPUTED = {"float32": CANARY_TOLERANCE, "float16": 3e-3, "bfloat16": 2e-2}
_UPLOADED = {"float32": CANARY_TOLERANCE, "float16": 1e-3, "bfloat16": 1e-3}

# A tensor counts by its own norm, and by no less than this share of the whole update's: the
# gradient of a key's bias in attention is zero but for rounding, which is no difference.
SMALLEST = 1e-3

# torch's, where what was announced does not fit what was sent, or what a witness saw does not fit
# the model: a label that it has no class for, pictures of another shape, no parameter to learn.
UNLEARNABLE = (RuntimeError, IndexError, ValueError)

_WAY = "6"  # of computing a canary: those of another way are computed again


class Kept(BaseModel):
    """One canary, and the hash of what it was computed from."""

    error: float
    of: str


class _Canaries(BaseModel):
    """The file of them, and a hash of all under the vault's key."""

    canaries: dict[str, Kept]
    hash: str


def tolerance_of(train: TrainSpec | Protocol) -> float:
    """How far a replay may be from what was observed, for the numbers that clients compute and
    upload in."""
    return max(_COMPUTED[train.precision], _UPLOADED[train.upload_dtype])


def check_canaries(run: Run, victims: list[tuple[int, int]]) -> dict[str, float]:
    """The relative error of each victim's replay; computed once and kept."""
    known = _known_canaries(run)
    device = resolve_device(run.spec.engine.device)
    for round_, client in victims:
        name = observation_name(round_, client)
        where = {"round": round_, "client": client}
        before = known.pop(name, None)
        try:
            known[name] = _checked(run, round_, client, before, device)
        except ForeignTruthError as error:
            run.note("foreign_truth", f"{name}: {error}", **where)
        except FedsimError as error:
            run.note("canary_failed", f"{name}: {error}", **where)
        except UNLEARNABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            run.note("canary_failed", f"{name}: {reason}", **where)
    keep_canaries(run, known)
    return {name: kept.error for name, kept in known.items()}


def _checked(run: Run, round_: int, client: int, before: Kept | None, device: torch.device) -> Kept:
    """A victim's canary: the one from before where it was computed from the same."""
    path = run.observations / f"{observation_name(round_, client)}.json"
    refuse_foreign(path, run.spec, run.classes)
    vault = Vault(run.vault)
    truth = vault.read(round_, client, recorded_checksum(path))
    own = vault.read_state(round_, client)
    of = computed_from(path, truth, own)
    if before is not None and before.of == of:
        return before
    observation = read_observation(path)
    if run.spec.captured is not None:
        return Kept(error=captured_canary(observation, truth, device), of=of)
    return Kept(error=canary(observation, truth, device, run.spec.cohort(round_), own), of=of)


def computed_from(path: Path, truth: Truth, own: Mapping[str, Tensor]) -> str:
    """A hash of what a canary depends on: the observation's own record and that of the weights
    sent, each with the checksum of its tensors, the truth, and the client's state."""
    records = (path, (path.parent / paths.WEIGHTS).with_suffix(".json"))
    written = [file.read_bytes() if file.is_file() else b"" for file in records]
    whole = [_WAY.encode(), *written, truth.digest().encode(), checksum(own).encode()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in whole)).hexdigest()


def keep_canaries(run: Run, canaries: Mapping[str, Kept]) -> None:
    """Write canaries down, signed."""
    content = {name: kept.model_dump() for name, kept in canaries.items()}
    write_json(run.canaries, {"canaries": content, "hash": _signature(run, content) or ""})


def _signature(run: Run, content: Mapping[str, Mapping[str, object]]) -> str | None:
    """What only a holder of the vault's key can write; None where the vault has none."""
    key = Vault(run.vault).keys.present()
    text = json.dumps(content, sort_keys=True).encode()
    return key.sign(text, paths.CANARIES) if key is not None else None


def _known_canaries(run: Run) -> dict[str, Kept]:
    """What was computed before; nothing where the file is damaged, altered or of an older version:
    it is computed again."""
    try:
        known = _Canaries.model_validate(read_json(run.canaries))
    except (FileNotFoundError, DamagedError, ValidationError):
        return {}
    content = {name: kept.model_dump() for name, kept in known.canaries.items()}
    signature = _signature(run, content)
    if signature is None:
        return {}
    if not hmac.compare_digest(signature.encode(), known.hash.encode()):
        run.note("mended", f"{paths.CANARIES} was altered; its canaries are computed again")
        return {}
    return known.canaries


def canary(
    observation: Observation,
    truth: Truth,
    device: torch.device,
    cohort: Sequence[int] = (),
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> float:
    """How far the replay is from what was observed, in whichever part of the update it is furthest.

    The replay uses what the protocol announced: its weights, model, normalisation, steps and
    declared defenses; of the client's secrets only the batch, the seed of those defenses and what
    they kept back before (``own``). It runs on the clients' kind of device: others round
    differently.
    """
    public = observation.public
    model = announced(public)
    model.load_state_dict(observation.weights)
    model.to(device)
    defenses = [
        defense.at_round(observation.round, observation.client, cohort)
        for defense in recall(declared(public.defenses), own)
    ]
    with threads(1):
        replay = local_update(
            model,
            [(images.to(device), labels.to(device)) for images, labels in truth.replay()],
            replace(public.protocol, loss=public.protocol.loss.balanced_by(truth.class_weights)),
            defenses=defenses,
            rng=truth.coin(),
        )
    mask, where = hiding(defenses), (observation.round, list(cohort), [observation.client])
    if mask is None or not cohort:
        return relative_error(replay, observation.update)
    # Beside masks of 63 bits any update is nothing: compared is what lies under them.
    return relative_error(*(_unmasked(u, mask, *where) for u in (replay, observation.update)))


def captured_canary(observation: Observation, truth: Truth, device: torch.device) -> float:
    """The same for a client of somebody's own app: parameters that it did not upload it did not
    train, and its count of examples is its own. The witness counts: where it saw other batches than
    were declared, the canary fails."""
    if undeclared(observation, truth) is not None:
        return 1.0
    return replay_error(observation, truth, observation.public.protocol, device)


def replay_error(
    observation: Observation, truth: Truth, protocol: Protocol, device: torch.device
) -> float:
    """How far the replay of a captured client that trains by this ``protocol`` is from what was
    observed; where noise was declared whose coins are the client's own, as far as that does not
    explain it."""
    replay, observed = replayed(observation, truth, protocol, device)
    unseen = quiet(declared(observation.public.defenses))
    return unexplained(replay, observed, unseen[1]) if unseen else relative_error(replay, observed)


def replayed(
    observation: Observation,
    truth: Truth,
    protocol: Protocol,
    device: torch.device,
    *,
    seed: int = 0,
) -> tuple[Update, Update]:
    """The replay of a captured client that trains by this ``protocol``, without noise that is the
    client's own, and what was observed; ``seed`` is that of dropout."""
    public, observed = observation.public, observation.update
    model = announced(public)
    model.load_state_dict(observation.weights)
    model.to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in observed.tensors)
    defenses = [
        defense.at_round(observation.round, observation.client, ())
        for defense in declared(public.defenses)
    ]
    unseen = quiet(defenses)
    with threads(1):
        replay = local_update(
            model,
            [(images.to(device), labels.to(device)) for images, labels in truth.replay()],
            replace(protocol, loss=protocol.loss.balanced_by(truth.class_weights)),
            defenses=unseen[0] if unseen is not None else defenses,
            rng=truth.coin(),
            seed=seed,
            sent=observation.weights,
        )
    # What travels is weights: the difference from those that were sent has their rounding.
    travelled = {
        name: _as_difference(tensor.cpu(), observation.weights[name], observed.tensors.get(name))
        for name, tensor in replay.tensors.items()
    }
    replay = replace(replay, tensors=travelled, num_examples=observed.num_examples)
    # Counters that were averaged come back as floats from some of Flower's mods.
    buffers = {
        name: buffer.to(replay.buffers[name].dtype)
        if name in replay.buffers and torch.equal(buffer, buffer.round())
        else buffer
        for name, buffer in observed.buffers.items()
    }
    # And statistics in whatever numbers they were uploaded in.
    own = {
        name: buffer.to(buffers[name].dtype)
        if name in buffers and buffer.is_floating_point() and buffers[name].is_floating_point()
        else buffer
        for name, buffer in replay.buffers.items()
    }
    replay = replace(replay, buffers=own)
    return replay, replace(observed, buffers=buffers)


def _as_difference(update: Tensor, sent: Tensor, like: Tensor | None) -> Tensor:
    kind = update.dtype if like is None else like.dtype
    return (sent.to(update) + update).to(kind) - sent.to(kind)


def _unmasked(
    update: Update, mask: Defense, round_: int, cohort: list[int], own: list[int]
) -> Update:
    """What one client uploaded, as if all others of its cohort had dropped out."""
    clear = mask.reveal(update.tensors, round_, cohort, own)
    return update if clear is None else replace(update, tensors=clear)


def relative_error(replay: Update, observed: Update) -> float:
    """How far two updates are apart in anything that attacks read: the worst of the tensors and
    buffers, each relative to the second; 1 where kinds, names, shapes, types, counters or the
    number of examples differ.

    Each for itself, because an attack may read one alone: a change that is nothing beside the whole
    can be all of the gradient that it solves for. `SMALLEST` says for which tensors it is not.
    """
    if (replay.kind, replay.num_examples) != (observed.kind, observed.num_examples):
        return 1.0
    pairs = _pairs(replay.tensors, observed.tensors)
    buffers = _pairs(replay.buffers, observed.buffers)
    if pairs is None or buffers is None:
        return 1.0
    least = SMALLEST * _norm([tensor for _, tensor in pairs])
    apart = [_apart(*pair, least) for pair in pairs]
    return float(np.max([*apart, *(_buffer_apart(*pair) for pair in buffers), 0.0]))


def _pairs(
    replay: Mapping[str, Tensor], observed: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]] | None:
    """The tensors of both sides by name; None where they are not alike."""
    if _forms(replay) != _forms(observed):
        return None
    return [(replay[n].cpu(), t.cpu()) for n, t in observed.items()]


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _buffer_apart(replay: Tensor, observed: Tensor) -> float:
    """As `_apart`; how many batches a layer has seen is a number that is right or wrong."""
    if observed.is_floating_point():
        return _apart(replay, observed)
    return float(not torch.equal(replay, observed))


def _apart(replay: Tensor, observed: Tensor, least: float = 0.0) -> float:
    distance = _norm([replay.double() - observed.double()])
    size = max(_norm([observed]), least)
    return distance / size if size > 0 else float(distance > 0)


def _norm(tensors: Sequence[Tensor]) -> float:
    """Of all of them together."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
