"""Submission: a file of reconstructions that somebody made of a published run.

safetensors, one tensor for each observation that was attacked, ``round-0001/client-0003`` of shape
(k, 3, S, S) with values in [0, 1], and four words of metadata: ``format``, ``spec`` (the digest of
the run's spec), ``attack`` (what made them) and ``observations`` (as JSON, the checksum of each
observation that is in the file). The file comes from anybody: its size is bounded before it is
read, its header before it is parsed, and nothing in it is believed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedsim.board.names import checked_name
from fedsim.campaign.seen import read_from
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import read_json, write_atomically
from fedsim.core.knowledge import granted_by
from fedsim.core.observation import recorded_checksum, recorded_pictures
from fedsim.core.reading import read_file
from fedsim.core.run import Run, observation_name, observation_path
from fedsim.core.text import brief

FORMAT = "fedsim-submission-1"
EXPORT = "export.json"  # what a published run says of itself
MOST_HEADER = 2**20
_WIDEST = 8  # bytes of a number
_KINDS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WORDS = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class Submission:
    """What a file holds, checked against the run that it is of."""

    attack: str
    images: dict[tuple[int, int], Tensor]  # by round and client
    checksums: dict[str, str]  # of the observations, by name
    digest: str  # of the file


def write_submission(
    path: str | Path, images: Mapping[str, Tensor], published: str | Path, attack: str
) -> None:
    """The file that `fedsim board submit` takes: reconstructions of the observations in a
    ``published`` directory, each by the observation's name."""
    try:
        about = read_json(Path(published) / EXPORT, links=True)
        known = {name: one["checksum"] for name, one in about["observations"].items()}
        spec = about["spec"]
    except (OSError, DamagedError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"'{published}' is no published run: {EXPORT} cannot be read.") from error
    for name in images.keys() - known.keys():
        raise RunError(f"'{published}' has no observation {brief(name)}.")
    words = {
        "format": FORMAT,
        "spec": spec,
        "attack": checked_name(attack, "the attack's name"),
        "observations": json.dumps({name: known[name] for name in images}),
    }
    whole = {name: one.detach().cpu().float().contiguous() for name, one in images.items()}
    write_atomically(Path(path), save(whole, words))


def read_submission(path: Path, run: Run) -> Submission:
    """A file that is to be scored, or in one sentence why it is not."""
    victims = _victims(run)
    content = _content(path, sum(most * _pixels(run) for _, most in victims.values()))
    words, tensors = _parsed(content, path)
    digest = run.spec.digest()
    for key in ("format", "spec", "attack", "observations"):
        if key not in words:
            raise RunError(f"'{path}' lacks the metadata '{key}'; see docs/board.md.")
    if words["format"] != FORMAT:
        raise RunError(f"'{path}' is of format {brief(words['format'])}; this reads {FORMAT}.")
    if words["spec"] != digest:
        raise RunError(
            f"'{path}' is of a run whose spec is {brief(words['spec'])}, not {digest} as here."
        )
    checksums = _checksums(words["observations"], path)
    if not tensors:
        raise RunError(f"'{path}' holds no picture.")
    if checksums.keys() != tensors.keys():
        raise RunError(
            f"the metadata 'observations' of '{path}' must name the checksum of every tensor in "
            f"it, and of no other."
        )
    images = {}
    for name, tensor in tensors.items():
        if name not in victims:
            raise RunError(f"'{path}' has pictures of {brief(name)}, which was not attacked here.")
        address, most = victims[name]
        if checksums[name] != recorded_checksum(_observation(run, address)):
            raise RunError(f"'{path}' was made from another observation {name} than this run's.")
        images[address] = _checked(tensor, name, most, run.spec.data.image_size)
    attack = checked_name(words["attack"], "the attack's name")
    return Submission(attack, images, checksums, hashlib.sha256(content).hexdigest())


def _victims(run: Run) -> dict[str, tuple[tuple[int, int], int]]:
    """The observations that were scored, each with its address and how many pictures can stand
    behind it by all that is public."""
    scored = run.scores[["round", "client"]].drop_duplicates()
    granted = granted_by(run.spec.threat)
    found = {}
    for round_, client in sorted(tuple(map(int, pair)) for pair in scored.to_numpy()):
        path = _observation(run, (round_, client))
        most = sum(recorded_pictures(file) or 0 for file in read_from(path, granted))
        found[observation_name(round_, client)] = ((round_, client), most)
    return found


def _observation(run: Run, address: tuple[int, int]) -> Path:
    return observation_path(run.observations, *address).with_suffix(".json")


def _pixels(run: Run) -> int:
    """Bytes that a picture may take."""
    return _WIDEST * 3 * int(run.spec.data.image_size) ** 2


def _content(path: Path, most: int) -> bytes:
    """The file, which the user named, where it is no larger than its pictures can be."""
    try:
        return read_file(path, most + MOST_HEADER + 8, links=True)
    except OSError as error:
        raise RunError(f"the submission '{path}' cannot be read: {error.strerror}.") from error


def _parsed(content: bytes, path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file in memory."""
    nothing = RunError(f"'{path}' is no safetensors file.")
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MOST_HEADER, len(content) - 8):
        raise nothing
    try:
        header: Any = json.loads(content[8 : 8 + length])
        words = _WORDS.validate_python(header.get("__metadata__") or {})
        return words, load(content)
    # whatever a parser makes of meaningless bytes
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise nothing from None
    except RuntimeError:  # torch's, of a shape that no tensor has
        raise nothing from None


def _checksums(text: str, path: Path) -> dict[str, str]:
    try:
        return _WORDS.validate_json(text)
    except ValidationError:
        raise RunError(
            f"the metadata 'observations' of '{path}' is no JSON of names and checksums."
        ) from None


def _checked(images: Tensor, name: str, most: int, side: int) -> Tensor:
    """Pictures as they are scored."""
    if images.dtype not in _KINDS:
        raise RunError(f"the pictures of {name} are {images.dtype}, not floating point numbers.")
    if images.ndim != 4 or tuple(images.shape[1:]) != (3, side, side) or not len(images):
        raise RunError(
            f"the pictures of {name} are of shape {tuple(images.shape)}, not "
            f"(k, 3, {side}, {side})."
        )
    if len(images) > most:
        raise RunError(
            f"there are {len(images)} pictures of {name}, and at most {most} stand behind it."
        )
    images = images.float()
    if not torch.isfinite(images).all():
        raise RunError(f"the pictures of {name} hold numbers that are not finite.")
    if float(images.min()) < 0 or float(images.max()) > 1:
        raise RunError(
            f"the pictures of {name} have values from {float(images.min()):.3g} to "
            f"{float(images.max()):.3g}; they must lie in [0, 1]."
        )
    return images
