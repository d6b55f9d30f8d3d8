"""Errors a user may meet: one sentence each, what is wrong, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fedsim.core.text import visible


class FedsimError(Exception):
    """Base of every error the command line prints without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """One line, whatever it quotes."""
        return visible(" ".join(super().__str__().split()))


class SpecError(FedsimError):
    """A spec, an override or a parameter is not what it should be."""

    exit_code = 2


class DataError(FedsimError):
    """A data set is missing, empty or too small for what was asked."""


class ModelError(FedsimError):
    """A model or checkpoint cannot be had, or lacks a part that is needed."""


class ObservationError(FedsimError):
    """A captured observation is missing or damaged."""


class AttackError(FedsimError):
    """An attack cannot do its work on this observation."""


class AttackCrashError(AttackError):
    """An attack raised what would end a program: it has crashed, and nothing else ends."""


class NotGranted(FedsimError):  # noqa: N818 - a word of the design
    """An attack read something its threat model does not grant."""


class MisplacedObservationError(ObservationError):
    """An observation, or what was sent in a round, lies where another one belongs."""


class ForeignObservationError(ObservationError):
    """An observation lies in a run of another experiment."""


class ReplyError(FedsimError):
    """A client's reply is not what the protocol asks for: it is left out, and the round goes on."""


class RunError(FedsimError):
    """A run directory cannot be used as asked."""


class ForeignCheckpointError(RunError):
    """A checkpoint lies in a run of another experiment."""


class VaultError(RunError):
    """The vault cannot be written or read: trouble of whoever keeps it, not of the training."""


class ForeignTruthError(VaultError):
    """A truth lies where that of another client, round or update belongs."""


class MissingKeyError(VaultError):
    """A vault is encrypted and its key is not here."""


class DamagedError(FedsimError):
    """A file is not what was written: cut short, overwritten or altered."""


class MisplacedError(DamagedError):
    """A file does not open where it lies: it is damaged, or another's."""


class InClearError(DamagedError):
    """A file lies in clear where everything is encrypted: whoever put it there had no key."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""
