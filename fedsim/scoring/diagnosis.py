"""Diagnosis: where a canary fails, which single field of the declaration most likely is wrong.

The truth is replayed under one change at a time; the one that gives the update observed is named.
A learning rate is fitted: for plain steps it scales the update, so a few replays find it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedsim.core.learning import Protocol, Update
from fedsim.core.losses import Loss
from fedsim.core.observation import Observation
from fedsim.core.vault import Truth
from fedsim.scoring.canary import NORMALISATIONS, replay_error, replayed, tolerance_of, undeclared

SECONDS = 120.0  # for all replays of one diagnosis
FITS = 8  # replays of one fit of the learning rate
NEAR = 0.03  # how far a round number may be from the one that was fitted
CLOSER = 10.0  # how many times nearer a change must come to be named where none gives the update


@dataclass(frozen=True)
class Diagnosis:
    """The field that most likely is wrong, what it rather is, and how far a replay is with that."""

    field: str
    declared: str
    rather: str
    error: float
    holds: bool  # whether the replay then gives the update

    @property
    def words(self) -> str:
        how = "the replay gives the update" if self.holds else "the replay comes far closer"
        return (
            f"Most likely {self.field} is wrong: with {self.rather}, and not {self.declared} as "
            f"declared, {how}."
        )


def diagnose(observation: Observation, truth: Truth, device: torch.device) -> Diagnosis | None:
    """The change of one field that explains an update; None where none that is tried does."""
    public = observation.public
    seen = undeclared(observation, truth)
    if seen is not None:
        field, said, rather = seen
        return Diagnosis(field, said, f"{rather}, as its witness saw", 0.0, True)
    protocol, tolerance = public.protocol, tolerance_of(public.protocol)
    until = time.monotonic() + SECONDS

    def error_of(changed: Protocol) -> float:
        return replay_error(observation, truth, changed, device)

    before = error_of(protocol)
    best: Diagnosis | None = None
    fitted = _fitted(observation, truth, device, until)
    for field, changed, said, rather in [*fitted, *_changes(protocol)]:
        if time.monotonic() > until:
            break
        error = error_of(changed)
        if best is None or error < best.error:
            best = Diagnosis(field, said, rather, error, error <= tolerance)
        if best.holds:
            return best
    backwards = replace(truth, batches=truth.batches[::-1])
    if len(truth.batches) > 1 and time.monotonic() < until:
        error = replay_error(observation, backwards, protocol, device)
        if error <= tolerance:
            words = ("the order of its batches", "its witness's", "the opposite")
            return Diagnosis(*words, error, True)
    return best if best is not None and best.error * CLOSER < before else None


Change = tuple[str, Protocol, str, str]  # the field, with it changed, what it was, what it is


def _fitted(
    observation: Observation, truth: Truth, device: torch.device, until: float
) -> list[Change]:
    """The learning rate with which the replay is as long as the update, along it."""
    protocol = observation.public.protocol
    lr, tried = protocol.lr, list[tuple[float, float]]()  # logarithms of a rate, and of its scale
    for _ in range(FITS):
        replay, observed = replayed(observation, truth, replace(protocol, lr=lr), device)
        scale = _along(replay, observed)
        if scale is None or time.monotonic() > until:
            return []
        tried.append((math.log(lr), math.log(scale)))
        if abs(scale - 1) < 1e-6:
            break
        lr = math.exp(_next(tried))
    # People choose round numbers.
    near = dict.fromkeys([float(f"{lr:.{digits}g}") for digits in (1, 2, 3)] + [lr])
    likely = [one for one in near if abs(one / lr - 1) < NEAR and one != protocol.lr]
    return [
        ("train.lr", replace(protocol, lr=one), f"{protocol.lr:g}", f"{one:.4g}") for one in likely
    ]


def _next(tried: list[tuple[float, float]]) -> float:
    """Where the logarithm of the scale would be zero, by the last two rates; at first, and where
    these say nothing, as if the update grew with the rate."""
    at, off = tried[-1]
    if len(tried) > 1:
        slope = (off - tried[-2][1]) / (at - tried[-2][0] or 1.0)
        if -3 < slope < -0.2:
            return at - off / slope
    return at + off


def _along(replay: Update, observed: Update) -> float | None:
    """How long the second is along the first, in lengths of the first."""
    if replay.tensors.keys() != observed.tensors.keys():
        return None
    pairs = [(replay.tensors[n].cpu().double(), t.double()) for n, t in observed.tensors.items()]
    inner = sum(float((a * b).sum()) for a, b in pairs)
    size = sum(float(a.square().sum()) for a, _ in pairs)
    return inner / size if size > 0 and inner > 0 else None


def _changes(protocol: Protocol) -> Iterator[Change]:
    """Every other single change that is tried, the likeliest first."""

    def change(field: str, section: str = "train", **values: Any) -> Change:
        name, value = next(iter(values.items()))
        said = getattr(protocol, name)
        return f"{section}.{field}", replace(protocol, **values), _told(said), _told(value)

    if protocol.optimizer == "sgd":
        for momentum in (0.9, 0.0, 0.5, 0.95, 0.99):
            if momentum != protocol.momentum:
                yield change("momentum", momentum=momentum)
    for optimizer in ("sgd", "adam", "adamw"):
        if optimizer != protocol.optimizer:
            yield change("optimizer", optimizer=optimizer)
    yield change("mode", mode="eval" if protocol.mode == "train" else "train")
    for decay in (0.0, 1e-4, 5e-4, 1e-3, 1e-2, 5e-2, 1e-5):
        if decay != protocol.weight_decay:
            yield change("weight_decay", weight_decay=decay)
    for name, (mean, std) in NORMALISATIONS.items():
        if (mean, std) != (protocol.mean, protocol.std):
            said = f"mean {_told(protocol.mean)} and std {_told(protocol.std)}"
            rather = f"{name} (mean {_told(mean)}, std {_told(std)})"
            changed = replace(protocol, mean=mean, std=std)
            yield "data.mean and data.std", changed, said, rather
    for smoothing in (0.1, 0.0, 0.05, 0.2):
        if smoothing != protocol.loss.label_smoothing:
            loss = Loss(smoothing, protocol.loss.weights, protocol.loss.soft)
            said = f"label smoothing {protocol.loss.label_smoothing:g}"
            changed = replace(protocol, loss=loss)
            yield "train.loss", changed, said, f"label smoothing {smoothing:g}"
    for clip in (1.0, None, 5.0, 0.5, 10.0):
        if clip != protocol.clip:
            yield change("clip", clip=clip)
    for proximal in (0.0, 0.01, 0.1, 1.0, 0.001):
        if proximal == protocol.proximal:
            continue
        said = f"a proximal term of {protocol.proximal:g}"
        changed = replace(protocol, proximal=proximal)
        yield "train.strategy_options", changed, said, f"one of {proximal:g} (FedProx)"


def _told(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_told(one) for one in value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
