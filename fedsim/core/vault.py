"""Vault: the truth. Written by the client side, read by the testbed, never by an attack.

Images, labels and the client's seeds, in a directory that only its owner can enter, encrypted under
a key that is kept elsewhere (`fedsim.core.keyring`). Scoring reads it, and so does whoever grants
an attack a part of the truth. No module under ``attacks/`` imports this one, and to a running
attack (`fedsim.core.seal`) the vault does not open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedsim.core.coin import WIDEST, coin_of
from fedsim.core.errors import (
    DamagedError,
    ForeignTruthError,
    InClearError,
    MisplacedError,
    VaultError,
)
from fedsim.core.files import (
    UNFINISHED,
    checksum,
    tensors_from_bytes,
    tensors_to_bytes,
    write_atomically,
)
from fedsim.core.keyring import Key, Keyring
from fedsim.core.reading import read_file
from fedsim.core.run import observation_name, state_path, truth_path
from fedsim.core.seal import refuse_attacks

if TYPE_CHECKING:
    from fedsim.core.learning import Batch


@dataclass(frozen=True)
class Truth:
    """What a client learned from in one round.

    ``images`` (M, 3, H, W) in [0, 1] and ``labels`` (M,) are the distinct samples as the model saw
    them, each augmented view one of its own; ``batches`` lists, step by step, which were used.
    """

    images: Tensor
    labels: Tensor
    batches: list[list[int]]
    defense_seed: int
    trail: list[dict[str, str]]  # what each defense changed, as digests
    stateful: bool = False  # whether the client kept a state of its own
    update: str = ""  # the checksum of what the client sent; older files do not tell
    findings: list[dict[str, Any]] = field(default_factory=list)  # of the client's guards
    originals: Tensor | None = None  # (K, 3, H, W), where the model was shown them augmented
    origins: list[int] = field(default_factory=list)  # of each image, the original it shows most of
    mixtures: Tensor | None = None  # (M, C), where labels were mixed: ``labels`` are dominant ones
    class_weights: tuple[float, ...] = ()  # of the loss, where this client alone knows them

    @property
    def sources(self) -> Tensor:
        """The picture behind each image, before it was augmented: (M, 3, H, W)."""
        return self.images if self.originals is None else self.originals[self.origins]

    def replay(self) -> list[Batch]:
        """The batches as the model saw them."""
        labels = self.labels if self.mixtures is None else self.mixtures
        return [(self.images[rows], labels[rows]) for rows in self.batches]

    def digest(self) -> str:
        """A hash of all that a replay depends on."""
        pixels = checksum(self._tensors())
        rest = [[*self.images.shape], self.batches, self.defense_seed, self.update]
        rest += [list(self.class_weights)] if self.class_weights else []
        return hashlib.sha256(f"{pixels} {json.dumps(rest)}".encode()).hexdigest()

    def _tensors(self) -> dict[str, Tensor]:
        held = {"images": self.images, "labels": self.labels}
        held |= {} if self.originals is None else {"originals": self.originals}
        return held | ({} if self.mixtures is None else {"mixtures": self.mixtures})

    def coin(self) -> torch.Generator:
        """The coin that the client's defenses drew by, as it was at first."""
        return coin_of(self.defense_seed)


class Vault:
    """The truths of a run, and the private state of its clients.

    With a ``key`` in hand it opens and is written under that one alone. Otherwise keys are looked
    for in ``folders``, by default the user's own.
    """

    def __init__(self, root: Path, key: Key | None = None, folders: Sequence[Path] | None = None):
        self.root, self.keys = root, Keyring(root, key, folders)

    def write(
        self, round_: int, client: int, truth: Truth, state: Mapping[str, Tensor] | None = None
    ) -> None:
        """Keep a client's truth, and its own state after the round: BatchNorm statistics it does
        not share, and what its defenses keep back."""
        about = {
            "batches": truth.batches,
            "defense_seed": truth.defense_seed,
            "trail": truth.trail,
            "stateful": bool(state),
            "update": truth.update,
            **({"findings": truth.findings} if truth.findings else {}),
            **({"origins": truth.origins} if truth.origins else {}),
            **({"class_weights": truth.class_weights} if truth.class_weights else {}),
            **_address(round_, client),
        }
        if state:
            whose = {"about": json.dumps(_address(round_, client))}
            self._keep(state_path(self.root, round_, client), tensors_to_bytes(state, whose))
        content = tensors_to_bytes(truth._tensors(), {"about": json.dumps(about)})
        self._keep(truth_path(self.root, round_, client), content)

    def read(self, round_: int, client: int, update: str | None = None) -> Truth:
        """A client's truth of a round; given the checksum of the ``update`` that was observed, the
        truth behind that one. Another one's is an error."""
        path = truth_path(self.root, round_, client)
        try:
            tensors, metadata = tensors_from_bytes(self._content(path), path)
            about = _About.model_validate_json(metadata["about"])
            images, labels = tensors["images"], tensors["labels"]
        except FileNotFoundError:
            raise VaultError(
                f"the vault has no truth for {observation_name(round_, client)}."
            ) from None
        except (DamagedError, KeyError, ValidationError) as error:
            raise VaultError(self._damaged(path, error)) from error
        if not _fits(images, labels, about):
            raise VaultError(self._damaged(path, "its batches do not fit its images"))
        originals, mixtures = tensors.get("originals"), tensors.get("mixtures")
        if not _belongs(images, originals, mixtures, about):
            raise VaultError(self._damaged(path, "its originals do not fit its images"))
        if not _is_used_up(images, about):
            raise VaultError(self._damaged(path, "it has images that no batch uses"))
        _refuse_foreign(path, about, round_, client)
        if update and about.update and update != about.update:
            raise ForeignTruthError(
                f"the vault's '{path}' is the truth of another update than the one observed."
            )
        return Truth(
            *(images, labels, about.batches, about.defense_seed, about.trail),
            stateful=about.stateful,
            update=about.update,
            findings=about.findings,
            originals=originals,
            origins=about.origins,
            mixtures=mixtures,
            class_weights=about.class_weights,
        )

    def read_state(self, before_round: int, client: int) -> dict[str, Tensor]:
        """The client's newest state from before a round; empty at its first."""
        refuse_attacks()
        for round_ in range(before_round - 1, 0, -1):
            path = state_path(self.root, round_, client)
            if path.is_file():
                try:
                    state, metadata = tensors_from_bytes(self._content(path), path)
                    about = _Whose.model_validate_json(metadata.get("about", "{}"))
                except (DamagedError, ValidationError) as error:
                    raise VaultError(self._damaged(path, error)) from error
                _refuse_foreign(path, about, round_, client)
                return state
        return {}

    def check(self, round_: int, client: int, update: str | None = None) -> None:
        """Raise where what a client left in a round is missing, damaged or another one's."""
        if self.read(round_, client, update).stateful:
            path = state_path(self.root, round_, client)
            if not path.is_file():
                raise VaultError(f"the vault's '{path}' is missing.")
            self.read_state(round_ + 1, client)

    def take(self, other: Vault, name: str) -> None:
        """Keep a file of another vault under this one's own key; a damaged one, as it is."""
        try:
            self._keep(self.root / name, other._content(other.root / name))
        except DamagedError:
            content = read_file(other.root / name, most=None)
            write_atomically(self.root / name, content, 0o600)

    def keep(self, name: str, content: bytes) -> None:
        """Keep a file of another kind than a truth, under the vault's key. It is whole or not
        there, but a power cut may take it: whoever writes it has no time to wait for the disk."""
        refuse_attacks()
        path = self.root / name
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}{UNFINISHED}")
            unfinished.touch(0o600)
            unfinished.write_bytes(self.keys.own().lock(content, self._place(path)))
            unfinished.replace(path)
        except OSError as error:
            raise VaultError(f"the vault cannot be written: {error.strerror}.") from error

    def content(self, name: str) -> bytes:
        """What `keep` was given; damage is an error."""
        return self._content(self.root / name)

    def _keep(self, path: Path, content: bytes) -> None:
        refuse_attacks()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)
            write_atomically(path, self.keys.own().lock(content, self._place(path)), 0o600)
        except OSError as error:
            raise VaultError(f"the vault cannot be written: {error.strerror}.") from error

    def _content(self, path: Path) -> bytes:
        """What a file holds, opened; in a vault without a key, as older versions wrote them, as it
        is."""
        refuse_attacks()
        try:
            content = read_file(path, most=None)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DamagedError(f"'{path}' cannot be read: {error.strerror}.") from error
        key = self.keys.of(content)
        return key.unlock(content, self._place(path)) if key is not None else content

    def _place(self, path: Path) -> str:
        """Where a file is in the vault: it opens there alone."""
        return path.relative_to(self.root).as_posix()

    @staticmethod
    def _damaged(path: Path, how: str | Exception) -> str:
        words = f"is damaged ({how if isinstance(how, str) else type(how).__name__})"
        if isinstance(how, MisplacedError):
            words = "is damaged, or was put in the place of another"
        if isinstance(how, InClearError):
            words = "lies in clear in a vault that is encrypted"
        return (
            f"the vault's '{path}' {words}; go on with `fedsim audit --resume` and its round is "
            f"done again."
        )


class _Whose(BaseModel):
    """Whose a file is; older ones do not tell."""

    round: int | None = None
    client: int | None = None


class _About(_Whose):
    """What a file says beside images and labels."""

    batches: list[list[int]]
    defense_seed: int
    trail: list[dict[str, str]]
    stateful: bool = False
    update: str = ""
    findings: list[dict[str, Any]] = []
    origins: list[int] = []
    class_weights: tuple[float, ...] = ()


def _address(round_: int, client: int) -> dict[str, int]:
    return {"round": round_, "client": client}


def _refuse_foreign(path: Path, about: _Whose, round_: int, client: int) -> None:
    """Raise where a file says that it belongs to another client or round."""
    named = (about.round, about.client)
    if None not in named and named != (round_, client):
        raise ForeignTruthError(
            f"the vault's '{path}' is of client {about.client} in round {about.round}, not of "
            f"client {client} in round {round_}."
        )


def _fits(images: Tensor, labels: Tensor, about: _About) -> bool:
    rows = [row for batch in about.batches for row in batch]
    return (
        images.ndim == 4
        and images.is_floating_point()
        and labels.dtype == torch.long
        and labels.shape == images.shape[:1]
        and all(0 <= row < len(images) for row in rows)
        and 0 <= about.defense_seed < WIDEST
    )


def _belongs(
    images: Tensor, originals: Tensor | None, mixtures: Tensor | None, about: _About
) -> bool:
    """Whether what is told beside the images is of these images."""
    if mixtures is not None and (mixtures.ndim != 2 or len(mixtures) != len(images)):
        return False
    if originals is None:
        return not about.origins
    fits = originals.ndim == 4 and originals.shape[1:] == images.shape[1:]
    known = all(0 <= origin < len(originals) for origin in about.origins)
    return fits and known and len(about.origins) == len(images)


def _is_used_up(images: Tensor, about: _About) -> bool:
    """Whether the client learned from every image, as `distinct` has it: one that it did not would
    be scored, and no canary could tell."""
    return {row for batch in about.batches for row in batch} == set(range(len(images)))


def distinct(batches: list[tuple[list[int], Batch]]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Images, labels and batch rows of the distinct samples in ``batches``.

    Each batch comes with its samples' indices in the shard.
    """
    rows: dict[int, int] = {}
    images, labels, layout = [], [], []
    for indices, (pictures, targets) in batches:
        for index, picture, target in zip(indices, pictures, targets, strict=True):
            if index not in rows:
                rows[index] = len(rows)
                images.append(picture)
                labels.append(target)
        layout.append([rows[index] for index in indices])
    return torch.stack(images), torch.stack(labels), layout
