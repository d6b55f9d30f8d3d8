"""Inference: what the server can tell of the training that nobody declared, and what it cannot.

Nothing is guessed: a fact is declared, or the app's own messages say it, or it follows from what
came back. A learning rate follows from nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.captures.log import Messages

# Names that apps give their settings, by ours; case, and dashes or underscores, make no difference.
SETTINGS: dict[str, tuple[str, ...]] = {
    "lr": ("lr", "learning-rate", "client-lr", "local-lr", "client-learning-rate"),
    "batch_size": ("batch-size", "batchsize", "bs", "train-batch-size"),
    "local_epochs": ("local-epochs", "epochs", "num-epochs", "num-local-epochs"),
    "local_steps": ("local-steps", "steps", "num-steps", "max-steps"),
    "optimizer": ("optimizer", "optim"),
    "momentum": ("momentum",),
    "weight_decay": ("weight-decay", "wd"),
}
RANK_TOLERANCE = 1e-4  # of singular values, relative to the largest: float32 weights are subtracted


@dataclass
class Inferred:
    """Facts of the training by their names, and a sentence for each that was not declared."""

    train: dict[str, Any]
    words: list[str] = field(default_factory=list)
    odd: set[int] = field(default_factory=set)  # rounds whose messages say something else

    @property
    def missing(self) -> list[str]:
        """What the server cannot do without and nobody said, as it is to be declared."""
        lacking = [f"train.{name}=..." for name in ("optimizer", "lr") if name not in self.train]
        if not self.train.keys() & {"local_epochs", "local_steps"}:
            lacking.append("train.local_epochs=... (or train.local_steps=...)")
        if "batch_size" not in self.train:
            lacking.append("train.batch_size=...")
        return lacking


def infer(declared: Mapping[str, Any], rounds: Sequence[Messages]) -> Inferred:
    """What is declared, and what the configurations that were sent add to it."""
    found = Inferred(dict(declared))
    for name, keys in SETTINGS.items():
        said = [_setting(messages.config, keys) for messages in rounds]
        known = [value for value in said if value is not None]
        if not known or not _could_be(name, known[0]):
            continue
        if name in found.train:
            continue
        if name in ("local_epochs", "local_steps") and found.train.keys() & {
            "local_epochs",
            "local_steps",
        }:
            continue
        found.train[name] = known[0].lower() if isinstance(known[0], str) else known[0]
        found.words.append(f"train.{name} is {known[0]}, as the messages to the clients say")
        others = {m.round for m, value in zip(rounds, said, strict=True) if value != known[0]}
        if others:
            found.odd |= others
            found.words.append(
                f"the messages say another train.{name} in {len(others)} of {len(rounds)} rounds, "
                f"which are left out"
            )
    _infer_proximal(found, rounds)
    return found


def _infer_proximal(found: Inferred, rounds: Sequence[Messages]) -> None:
    """FedProx asks its clients for a term; that they add it, the canary tells."""
    asked = {_setting(messages.config, ("proximal-mu",)) for messages in rounds}
    mu = asked.pop() if len(asked) == 1 else None
    if isinstance(mu, int | float) and mu > 0 and "strategy_options" not in found.train:
        found.train |= {"strategy": "FedProx", "strategy_options": {"proximal_mu": float(mu)}}
        found.words.append(f"clients are asked for FedProx's term, with proximal_mu {mu:g}")


def _setting(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
    plain = {key.lower().replace("_", "-"): value for key, value in config.items()}
    return next((plain[key] for key in keys if key in plain), None)


def _could_be(name: str, value: Any) -> bool:
    if name == "optimizer":
        return isinstance(value, str) and value.lower() in ("sgd", "adam", "adamw")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    whole = name in ("batch_size", "local_epochs", "local_steps")
    if whole:
        return value >= 1 and value == int(value)
    return value > 0 if name == "lr" else value >= 0


def infer_batch(found: Inferred, examples: Sequence[int | None], rank: int | None) -> None:
    """The batch size of clients that take one step, or have one example: by how many they count,
    where the rank of the update of the output layer agrees, to which each picture adds at most one
    in every step. Of an epoch the rank is the same, whatever its batches."""
    if "batch_size" in found.train or not examples or None in examples:
        return
    counts = {count for count in examples if count is not None}
    epochs, steps = found.train.get("local_epochs"), found.train.get("local_steps")
    if counts == {1} and rank is not None and rank <= max(epochs or 0, steps or 0):
        found.train["batch_size"] = 1
        found.words.append("train.batch_size is 1: every client says that it has one example")
    elif len(counts) == 1 and steps == 1 and rank in counts:
        found.train["batch_size"] = rank
        found.words.append(
            f"train.batch_size is {rank}: so many examples are counted, and the update of the "
            f"output layer has that rank"
        )


def rank_of(update: Tensor) -> int | None:
    """The rank of an output layer's update; None where it is as large as it can be, and so says
    nothing. The rows of a cross-entropy's sum to zero."""
    matrix = update.double().flatten(1)
    values = torch.linalg.svdvals(matrix)
    if not float(values.max()) > 0:
        return None
    rank = int((values > RANK_TOLERANCE * values.max()).sum())
    return rank if rank < min(matrix.shape[0] - 1, matrix.shape[1]) else None
