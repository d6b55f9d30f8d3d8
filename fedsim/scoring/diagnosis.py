"""Diagnosis: where a canary fails, which single field of the declaration most likely is wrong.

The truth is replayed under one change at a time; the one that gives the update observed is named.
A learning rate is fitted: for plain steps it scales the update, so a few replays find it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fedsim.core.learning import Protocol, Update
from fedsim.core.losses import Loss
from fedsim.core.observation import Observation
from fedsim.core.vault import Truth
from fedsim.scoring.canary import replay_error, replayed, tolerance_of
from fedsim.scoring.undeclared import COUNT, NORMALISATIONS, undeclared

SECONDS = 120.0  # for all replays of one diagnosis
FITS = 8  # replays of one fit of the learning rate
NEAR = 0.03  # how far a round number may be from the one that was fitted
CLOSER = 10.0  # how many times nearer a change must come to be named where none gives the update
ADAMW_DECAY = 0.01  # torch's, where nobody says another
EXPLAINED = 0.1  # and how near: to change nothing at all is as far off as 1

_COUNT_IT = "Have the replies count what was learned from, or declare train.local_steps."
_ODD = "A number as odd as this may stand for something else that scales a step, such as clipping."


@dataclass(frozen=True)
class Diagnosis:
    """The field that most likely is wrong, what it rather is, and how far a replay is with that."""

    field: str
    declared: str
    rather: str
    error: float
    holds: bool  # whether the replay then gives the update
    advice: str = ""

    @property
    def words(self) -> str:
        how = ", the replay gives the update" if self.holds else ", the replay comes far closer"
        if self.error > EXPLAINED:
            how = "; something else is wrong as well, because the replay does not give the update"
        return (
            f"Most likely {self.field} is wrong: with {self.rather}, and not {self.declared} as "
            f"declared{how}.{self.advice and ' '}{self.advice}"
        )


def diagnose(observation: Observation, truth: Truth, device: torch.device) -> Diagnosis | None:
    """The change of one field that explains an update; None where none that is tried does."""
    protocol = observation.public.protocol
    tolerance, until = tolerance_of(protocol), time.monotonic() + SECONDS

    def error_of(changed: Protocol) -> float:
        return replay_error(observation, truth, changed, device)

    before, seen = error_of(protocol), undeclared(observation, truth)
    if seen is not None:  # by what its witness saw it was replayed already
        rather, holds = f"{seen.seen}, as its witness saw", before <= tolerance
        advice = _COUNT_IT if seen.field == COUNT else ""
        error = before if holds else 1.0
        return Diagnosis(seen.field, seen.declared, rather, error, holds, advice)
    best: Diagnosis | None = None
    for change in _likeliest_first(observation, truth, device, until):
        if time.monotonic() > until:
            break
        error = error_of(change.protocol)
        if best is None or error < best.error:
            told = (change.field, change.declared, change.rather)
            best = Diagnosis(*told, error, error <= tolerance, change.advice)
        if best.holds:
            return best
    backwards = replace(truth, batches=truth.batches[::-1])
    if len(truth.batches) > 1 and time.monotonic() < until:
        error = replay_error(observation, backwards, protocol, device)
        if error <= tolerance:
            words = ("the order of its batches", "its witness's", "the opposite")
            return Diagnosis(*words, error, True)
    if best is None or tosses(observation, truth, device):
        return None
    return best if best.error < min(before / CLOSER, EXPLAINED) else None


def tosses(observation: Observation, truth: Truth, device: torch.device) -> bool:
    """Whether training tosses coins that nobody wrote down: then no two replays are alike."""
    protocol = observation.public.protocol
    one, other = (
        replayed(observation, truth, protocol, device, seed=seed)[0].tensors for seed in (0, 1)
    )
    return any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


class Change(NamedTuple):
    """A protocol of which one field is another."""

    field: str
    protocol: Protocol
    declared: str
    rather: str
    advice: str = ""


def _likeliest_first(
    observation: Observation, truth: Truth, device: torch.device, until: float
) -> Iterator[Change]:
    """People choose round numbers: a learning rate that is none comes last, because whatever scales
    a step can be told in one."""
    round_rates, odd_rates = _fitted(observation, truth, device, until)
    yield from round_rates
    yield from _changes(observation.public.protocol)
    yield from _clipped(observation, truth)
    yield from odd_rates


def _fitted(
    observation: Observation, truth: Truth, device: torch.device, until: float
) -> tuple[list[Change], list[Change]]:
    """The learning rate with which the replay is as long as the update, along it: as round numbers,
    and as others."""
    protocol = observation.public.protocol
    lr, tried = protocol.lr, list[tuple[float, float]]()  # logarithms of a rate, and of its scale
    for _ in range(FITS):
        replay, observed = replayed(observation, truth, replace(protocol, lr=lr), device)
        scale = _along(replay, observed)
        if scale is None or time.monotonic() > until:
            return [], []
        tried.append((math.log(lr), math.log(scale)))
        if abs(scale - 1) < 1e-6:
            break
        lr = math.exp(_next(tried))

    def changes(rates: Iterable[float], advice: str = "") -> list[Change]:
        near = [one for one in rates if abs(one / lr - 1) < NEAR and one != protocol.lr]
        return [
            Change("train.lr", replace(protocol, lr=one), f"{protocol.lr:g}", f"{one:.4g}", advice)
            for one in near
        ]

    few, more = (dict.fromkeys(_rounded(lr, digits)) for digits in ((1, 2), (3,)))
    return changes(few), changes([*more, lr], _ODD)


def _clipped(observation: Observation, truth: Truth) -> Iterator[Change]:
    """Of a single plain step the norm that its gradient was clipped to can be read off."""
    protocol = observation.public.protocol
    if len(truth.batches) > 1 or protocol.optimizer != "sgd" or protocol.clip is not None:
        return
    squares = sum(float(t.double().square().sum()) for t in observation.update.tensors.values())
    norm = math.sqrt(squares) / protocol.lr
    for one in dict.fromkeys(_rounded(norm, (1, 2))) if norm > 0 else ():
        if abs(one / norm - 1) < NEAR:
            yield Change("train.clip", replace(protocol, clip=one), "none", f"{one:g}")


def _rounded(number: float, digits: Iterable[int]) -> list[float]:
    return [float(f"{number:.{few}g}") for few in digits]


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
        return Change(f"{section}.{field}", replace(protocol, **values), _told(said), _told(value))

    if protocol.optimizer == "sgd":
        for momentum in (0.9, 0.0, 0.5, 0.95, 0.99):
            if momentum != protocol.momentum:
                yield change("momentum", momentum=momentum)
    for optimizer in ("sgd", "adam", "adamw"):
        if optimizer != protocol.optimizer:
            yield change("optimizer", optimizer=optimizer)
    if protocol.optimizer != "adamw" and not protocol.weight_decay:
        adamw = replace(protocol, optimizer="adamw", weight_decay=ADAMW_DECAY)
        rather = f"adamw and its weight decay of {ADAMW_DECAY:g}"
        yield Change("train.optimizer", adamw, protocol.optimizer, rather)
    yield change("mode", mode="eval" if protocol.mode == "train" else "train")
    for decay in (0.0, 1e-4, 5e-4, 1e-3, 1e-2, 5e-2, 1e-5):
        if decay != protocol.weight_decay:
            yield change("weight_decay", weight_decay=decay)
    for name, (mean, std) in NORMALISATIONS.items():
        if (mean, std) != (protocol.mean, protocol.std):
            said = f"mean {_told(protocol.mean)} and std {_told(protocol.std)}"
            rather = f"{name} (mean {_told(mean)}, std {_told(std)})"
            changed = replace(protocol, mean=mean, std=std)
            yield Change("data.mean and data.std", changed, said, rather)
    for smoothing in (0.1, 0.0, 0.05, 0.2):
        if smoothing != protocol.loss.label_smoothing:
            loss = Loss(smoothing, protocol.loss.weights, protocol.loss.soft)
            said = f"label smoothing {protocol.loss.label_smoothing:g}"
            changed = replace(protocol, loss=loss)
            yield Change("train.loss", changed, said, f"label smoothing {smoothing:g}")
    for clip in (1.0, None, 5.0, 0.5, 10.0):
        if clip != protocol.clip:
            yield change("clip", clip=clip)
    for proximal in (0.0, 0.01, 0.1, 1.0, 0.001):
        if proximal == protocol.proximal:
            continue
        said = f"a proximal term of {protocol.proximal:g}"
        changed = replace(protocol, proximal=proximal)
        yield Change("train.strategy_options", changed, said, f"one of {proximal:g} (FedProx)")


def _told(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_told(one) for one in value)})"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
