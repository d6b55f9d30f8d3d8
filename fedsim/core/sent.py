"""Sent: what one client received, where the server chose its weights.

Beside the weights of a round, ``weights.safetensors``, lie ``sent-0001.safetensors`` and so on,
each with tensors that were sent to somebody in their place. A tensor is stored once, whoever
received it: a head that was tampered with does not store the backbone again. The JSON of an
observation names the file of each tensor that its client did not receive as it is in the round's
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from fedsim.core.errors import DamagedError, ObservationError
from fedsim.core.files import checksum, read_tensors, save_tensors
from fedsim.core.run import sent_path


class Chosen(BaseModel):
    """A manoeuvre's choice for one client: which manoeuvre, what it was after (``about``), and the
    same in a sentence."""

    manoeuvre: dict[str, Any]  # the spec's component
    about: dict[str, Any] = {}
    words: str = ""
    asked: list[int] = []  # clients that the server asks in every round


class Places(BaseModel):
    """Where the tensors lie that one client received in place of the round's, and the checksum of
    all of them."""

    files: dict[str, int] = {}  # the number of the file, by the tensor's name
    checksum: str = ""


@dataclass
class Shelf:
    """The chosen tensors of one round as they are stored, each once."""

    folder: Path  # of the round's observations
    places: dict[str, int] = field(default_factory=dict)  # by a checksum of name and numbers
    files: int = 0

    def store(self, changed: Mapping[str, Tensor]) -> Places:
        """Write what is not stored yet; returns where everything is."""
        digests = {name: checksum({name: tensor}) for name, tensor in changed.items()}
        new = {name: changed[name] for name, of in digests.items() if of not in self.places}
        if new:
            self.files += 1
            save_tensors(sent_path(self.folder, self.files), new)
            self.places |= {digests[name]: self.files for name in new}
        where = {name: self.places[of] for name, of in digests.items()}
        return Places(files=where, checksum=checksum(changed))


def files_of(folder: Path, places: Places) -> list[Path]:
    """The files that hold what a client was sent in place of the weights of a round."""
    return [sent_path(folder, number) for number in sorted(set(places.files.values()))]


def read_sent(folder: Path, places: Places) -> dict[str, Tensor]:
    """The tensors that a client received in place of those of the round; damage is an error."""
    found: dict[str, Tensor] = {}
    for path in files_of(folder, places):
        try:
            tensors, _ = read_tensors(path)
        except FileNotFoundError:
            raise ObservationError(f"the observation '{path}' is missing.") from None
        except DamagedError as error:
            raise ObservationError(f"the observation {error}") from error
        number = int(path.stem.split("-")[1])
        found |= {n: t for n, t in tensors.items() if places.files.get(n) == number}
    if places.files and (found.keys() != places.files.keys() or checksum(found) != places.checksum):
        raise ObservationError(
            f"the weights that were sent in '{folder}' are damaged: their checksum is not the "
            f"recorded one."
        )
    return found
