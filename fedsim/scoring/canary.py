"""The canary: the true batch, replayed by the announced protocol, must give the update that was
observed. Where it does not, the attack was mis-specified, and a low score means nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedsim.core.device import resolve_device, threads
from fedsim.core.errors import DamagedError, FedsimError
from fedsim.core.files import read_json, write_json
from fedsim.core.learning import Update, local_update, recall
from fedsim.core.observation import Observation, read_observation
from fedsim.core.run import Run, observation_name
from fedsim.core.vault import Truth, Vault
from fedsim.defenses.applied import announced, declared

# Replays differ by rounding alone: about 1e-6 on a CPU, more after many local steps.
CANARY_TOLERANCE = 1e-4

_CANARIES = TypeAdapter(dict[str, float])


def check_canaries(run: Run, victims: list[tuple[int, int]]) -> dict[str, float]:
    """The relative error of each victim's replay; computed once and kept."""
    path = run.canaries
    known = _known_canaries(path)
    vault, device = Vault(run.vault), resolve_device(run.spec.engine.device)
    for round_, client in victims:
        name = observation_name(round_, client)
        if name in known:
            continue
        try:
            observation = read_observation(run.observations / f"{name}.json")
            known[name] = canary(
                observation,
                vault.read(round_, client),
                device,
                run.spec.cohort(round_),
                vault.read_state(round_, client),
            )
        except FedsimError as error:
            run.note("canary_failed", f"{name}: {error}", round=round_, client=client)
        except RuntimeError as error:  # torch: the announced model does not fit what was sent
            reason = str(error).splitlines()[0]
            run.note("canary_failed", f"{name}: {reason}", round=round_, client=client)
    write_json(path, known)
    return known


def _known_canaries(path: Path) -> dict[str, float]:
    """What was computed before; nothing where the file is damaged: it is computed again."""
    try:
        return _CANARIES.validate_python(read_json(path))
    except (FileNotFoundError, DamagedError, ValidationError):
        return {}


def canary(
    observation: Observation,
    truth: Truth,
    device: torch.device,
    cohort: Sequence[int] = (),
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> float:
    """|replay - observed| / |observed| over the whole update.

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
            public.protocol,
            defenses=defenses,
            rng=truth.coin(),
        )
    return relative_error(replay, observation.update)


def relative_error(replay: Update, observed: Update) -> float:
    """Distance of two updates relative to the second; 1 where their parameters differ."""
    if replay.tensors.keys() != observed.tensors.keys():
        return 1.0
    pairs = [(replay.tensors[n].cpu().double(), t.double()) for n, t in observed.tensors.items()]
    distance = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return (distance / size) ** 0.5 if size > 0 else float(distance > 0)
