"""Keyring: the keys of vaults, kept apart from them, and what lies under such a key.

A vault is encrypted at rest (AES-256-GCM). Its key has a file of its own in a folder that no attack
is told of, for its owner alone, and is named by a hash of itself; every file under it says that
name and is bound to its place in the vault, so that one put in the place of another does not open.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsim.core.errors import (
    DamagedError,
    InClearError,
    MisplacedError,
    MissingKeyError,
    VaultError,
)
from fedsim.core.files import write_atomically
from fedsim.core.reading import opened, read_file
from fedsim.core.run import vault_key_path
from fedsim.core.run.paths import PASSES
from fedsim.core.seal import refuse_attacks

VARIABLE = "FEDSIM_VAULT_KEYS"
_MARK = b"fedsim vault 1\n"  # how a file under a key begins; then its name, the nonce, the rest
_NAME, _NONCE, _SECRET = 16, 12, 32  # bytes


def key_folders() -> tuple[Path, ...]:
    """``$FEDSIM_VAULT_KEYS``, several as in ``$PATH``, or ``~/.local/state/fedsim/vault-keys``; new
    keys go into the first."""
    named = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    return tuple(Path(f).expanduser() for f in named or ["~/.local/state/fedsim/vault-keys"])


@dataclass(frozen=True, repr=False)
class Key:
    """What a vault is encrypted under."""

    secret: bytes

    @property
    def name(self) -> str:
        return hashlib.sha256(b"the name of a vault's key: " + self.secret).hexdigest()[: 2 * _NAME]

    def lock(self, content: bytes, place: str) -> bytes:
        """``content`` under the key, to be opened at this place alone."""
        refuse_attacks()
        head, nonce = _MARK + bytes.fromhex(self.name), secrets.token_bytes(_NONCE)
        return head + nonce + AESGCM(self.secret).encrypt(nonce, content, head + place.encode())

    def unlock(self, content: bytes, place: str) -> bytes:
        """What was locked at this place; damage is an error."""
        refuse_attacks()
        start = len(_MARK) + _NAME
        head, nonce, rest = content[:start], content[start : start + _NONCE], content[start:]
        try:
            return AESGCM(self.secret).decrypt(nonce, rest[_NONCE:], head + place.encode())
        except (InvalidTag, ValueError) as error:  # altered, or too short to be anything
            words = f"'{place}' is damaged, or was put in the place of another."
            raise MisplacedError(words) from error

    def sign(self, content: bytes, place: str) -> str:
        """A hash of what lies at this place in clear, which nobody without the key can make."""
        refuse_attacks()
        own = hashlib.sha256(b"what a vault's key signs by: " + self.secret).digest()
        return hmac.new(own, place.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def key_name(content: bytes) -> str | None:
    """The name of the key that a file lies under; None for one that is not encrypted."""
    if not content.startswith(_MARK):
        return None
    return content[len(_MARK) : len(_MARK) + _NAME].hex()


class Keyring:
    """The keys of one vault: the one in hand, or those that are found in ``folders``, by default
    the user's own."""

    def __init__(self, vault: Path, key: Key | None = None, folders: Sequence[Path] | None = None):
        self.vault, self.key = vault, key
        self.folders = tuple(() if key else key_folders() if folders is None else folders)

    def own(self) -> Key:
        """The key that the vault is written under; made when it is first asked for."""
        if self.key is None:
            self.key = self.mend() or self._say(self._first())
        return self.key

    def mend(self) -> Key | None:
        """The key that what lies in the vault was locked with, said again where the vault does not
        say it any more; None where nothing is."""
        key = self.present()
        return key if key is None or key.name == self._said() else self._say(key)

    def require(self) -> None:
        """Raise where what lies in the vault cannot be opened for want of its key."""
        self.present()

    def of(self, content: bytes) -> Key | None:
        """The key that a file of the vault lies under; None for a file of a vault that has no key,
        as older versions wrote them. In one that has, a file in clear is damage."""
        name = key_name(content)
        if name is None:
            if self.key is not None or self._said() or self._names():
                raise InClearError("it is not encrypted, and the vault is.")
            return None
        if key := self._found(name):
            return key
        if name == self._said():
            raise self._missing(name)
        raise DamagedError("it says that it lies under a key that nobody has.")

    def present(self) -> Key | None:
        """The key that the vault says it has; where that is none, one that its files name; None for
        a vault without one."""
        if self.key is not None:
            return self.key
        said = self._said()
        if said and (key := self._found(said)):
            return key
        names = self._names()
        for name in names:
            if key := self._found(name):
                return key
        if names:
            raise self._missing(said if said in names else names[0])
        return None

    def _names(self) -> list[str]:
        """The names of the keys that the vault's files lie under."""
        names = dict[str, None]()
        for path in self._files():
            with suppress(OSError), opened(path) as file:
                if name := key_name(file.read(len(_MARK) + _NAME)):
                    names[name] = None
        return list(names)

    def _files(self) -> list[Path]:
        kept = ("round-*/*.safetensors", f"{PASSES}/*.safetensors")
        return sorted(path for pattern in kept for path in self.vault.glob(pattern))

    def _first(self) -> Key:
        """A new key; what an older version left in clear is locked under it, once and for all."""
        before = [] if self._said() else self._files()
        key = self._made()
        try:
            for path in before:
                place = path.relative_to(self.vault).as_posix()
                write_atomically(path, key.lock(read_file(path, most=None), place), 0o600)
        except OSError as error:
            raise VaultError(f"the vault cannot be written: {error.strerror}.") from error
        return key

    def _made(self) -> Key:
        refuse_attacks()
        key, folder = Key(secrets.token_bytes(_SECRET)), self.folders[0]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(key_path(folder, key.name), f"{key.secret.hex()}\n".encode(), 0o600)
        except OSError as error:
            raise VaultError(
                f"the key of a vault cannot be kept in '{folder}': {error.strerror}; name another "
                f"folder in {VARIABLE}."
            ) from error
        return key

    def _found(self, name: str) -> Key | None:
        refuse_attacks()
        if self.key is not None and self.key.name == name:
            return self.key
        for folder in self.folders:
            with suppress(OSError, ValueError):
                key = Key(bytes.fromhex(key_path(folder, name).read_text()))
                if len(key.secret) == _SECRET and key.name == name:
                    return key
        return None

    def _said(self) -> str | None:
        """The name of its key, as it stands in the vault."""
        try:
            name = read_file(vault_key_path(self.vault)).decode().strip()
            return name if bytes.fromhex(name).hex() == name and len(name) == 2 * _NAME else None
        except (OSError, ValueError):
            return None

    def _say(self, key: Key) -> Key:
        try:
            self.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.vault.chmod(0o700)
            write_atomically(vault_key_path(self.vault), f"{key.name}\n".encode(), 0o600)
        except OSError as error:
            raise VaultError(f"the vault cannot be written: {error.strerror}.") from error
        return key

    def _missing(self, name: str) -> MissingKeyError:
        folder = (*self.folders, *key_folders())[0]
        return MissingKeyError(
            f"the vault '{self.vault}' is encrypted and its key is not here: bring '{name}.key' "
            f"from where it was written into '{folder}', or name the folder that has it in "
            f"{VARIABLE}."
        )


def key_path(folder: Path, name: str) -> Path:
    """Where a folder of keys has the one of this name."""
    return folder / f"{name}.key"
