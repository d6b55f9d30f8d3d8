"""Keys of vaults: for their owner alone, apart from the vault, found by their name."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from fedsim.core.errors import DamagedError, InClearError, MissingKeyError, NotGranted, VaultError
from fedsim.core.keyring import VARIABLE, Key, Keyring, key_folders, key_name, key_path
from fedsim.core.seal import sealed

FILE = "round-0001/client-0000.safetensors"


def kept(ring: Keyring, content: bytes = b"truth") -> Path:
    """A file of the vault, under its key."""
    path = ring.vault / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ring.own().lock(content, FILE))
    return path


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "run" / "vault", folders=[tmp_path / "keys"])


def again(ring: Keyring, *folders: Path) -> Keyring:
    """As another process finds it."""
    return Keyring(ring.vault, folders=folders or ring.folders)


def test_a_key_is_apart_from_its_vault_and_for_its_owner_alone(ring: Keyring) -> None:
    key = ring.own()
    (file,) = ring.folders[0].iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(ring.folders[0].stat().st_mode) == 0o700
    assert stat.S_IMODE(ring.vault.stat().st_mode) == 0o700
    assert key.secret.hex() not in (ring.vault / "key.id").read_text()
    assert key.secret.hex() not in repr(key)
    assert again(ring).own() == key
    assert len(list(ring.folders[0].iterdir())) == 1, "one key a vault"
    other = Keyring(ring.vault.parent / "other", folders=ring.folders)
    assert other.own() != key


def test_where_keys_are_is_the_users_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    first = Keyring(tmp_path / "a").own()
    assert key_path(tmp_path / "one", first.name).is_file()
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert Keyring(tmp_path / "a").own() == first
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert key_folders() == (tmp_path / "home" / ".local/state/fedsim/vault-keys",)


def test_a_file_opens_at_its_own_place_and_whole_alone(ring: Keyring) -> None:
    key = ring.own()
    locked = key.lock(b"the truth", FILE)
    assert b"the truth" not in locked
    assert key.lock(b"the truth", FILE) != locked, "no two files are under the same nonce"
    assert key.unlock(locked, FILE) == b"the truth"
    assert key_name(locked) == key.name
    for place, content in [
        ("round-0001/client-0001.safetensors", locked),
        (FILE, locked[:-1]),
        (FILE, locked[:20]),
        *((FILE, locked[:at] + bytes([locked[at] ^ 1]) + locked[at + 1 :]) for at in (16, 35, -1)),
    ]:
        with pytest.raises(DamagedError, match="is damaged"):
            key.unlock(content, place)


def test_a_vault_without_its_key_names_the_file_that_opens_it(
    ring: Keyring, tmp_path: Path
) -> None:
    content = kept(ring).read_bytes()
    away = again(ring, tmp_path / "elsewhere")
    name = ring.own().name
    for ask in (away.require, away.own, lambda: away.of(content)):
        with pytest.raises(MissingKeyError, match=f"bring '{name}.key' .* '{tmp_path}/elsewhere'"):
            ask()
    shutil.copytree(ring.folders[0], tmp_path / "elsewhere")
    assert away.of(content) == away.own() == ring.own()


def test_a_key_that_is_damaged_is_no_key(ring: Keyring) -> None:
    kept(ring)
    (file,) = ring.folders[0].iterdir()
    whole = file.read_text()
    for damaged in ("", "nonsense", whole[:32], "0" * 64):
        file.write_text(damaged)
        with pytest.raises(MissingKeyError):
            again(ring).require()
    file.write_text(whole)
    again(ring).require()
    assert again(ring).own() == ring.own()


@pytest.mark.parametrize("said", ["", "nonsense", "0" * 32, None])
def test_a_vault_that_lost_its_keys_name_finds_it_in_its_files(
    ring: Keyring, said: str | None
) -> None:
    kept(ring)
    where = ring.vault / "key.id"
    where.unlink() if said is None else where.write_text(said)
    assert again(ring).own() == ring.own()
    assert where.read_text().strip() == ring.own().name


def test_a_name_that_nothing_lies_under_stands_in_nobodys_way(
    ring: Keyring, tmp_path: Path
) -> None:
    first = ring.own()
    shutil.rmtree(ring.folders[0])
    again(ring).require()
    second = again(ring).own()
    assert second != first
    assert again(ring).own() == second


def test_a_file_that_says_another_key_is_damaged(ring: Keyring) -> None:
    locked = kept(ring).read_bytes()
    other = bytearray(locked)
    other[20] ^= 1
    with pytest.raises(DamagedError, match="a key that nobody has"):
        ring.of(bytes(other))
    assert ring.of(locked) == ring.own()


def test_a_file_in_clear_is_damage_where_there_is_a_key(ring: Keyring) -> None:
    assert ring.of(b"not encrypted at all") is None
    path = kept(ring)
    lost = again(ring)
    (ring.vault / "key.id").unlink()  # its files still say that there is one
    for one in (ring, again(ring), Keyring(ring.vault, ring.own()), lost):
        with pytest.raises(InClearError, match="it is not encrypted, and the vault is"):
            one.of(b"not encrypted at all")
    path.unlink()
    assert again(ring).of(b"not encrypted at all") is None


def test_what_an_older_version_left_in_clear_is_locked_once_there_is_a_key(ring: Keyring) -> None:
    path = ring.vault / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"in clear")
    key = ring.own()
    assert key.unlock(path.read_bytes(), FILE) == b"in clear"
    path.write_bytes(b"put there later")
    assert again(ring).own() == key
    assert path.read_bytes() == b"put there later", "nothing is taken in twice"


def test_what_a_key_signs_nobody_signs_without_it(ring: Keyring) -> None:
    key = ring.own()
    signed = key.sign(b"content", "place")
    assert key.sign(b"content", "place") == signed
    others = [key.sign(b"Content", "place"), key.sign(b"content", "Place")]
    assert signed not in (*others, Key(b"1" * 32).sign(b"content", "place"))


def test_a_key_in_hand_is_the_only_one(ring: Keyring) -> None:
    key = ring.own()
    handed = Keyring(ring.vault, key)
    assert handed.own() == key
    assert handed.folders == ()
    with pytest.raises(DamagedError):
        handed.of(Key(b"x" * 32).lock(b"", FILE))


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("in the way")
    with pytest.raises(
        VaultError, match=f"cannot be kept in .*; name another folder in {VARIABLE}"
    ):
        Keyring(tmp_path / "vault", folders=[tmp_path / "keys"]).own()


def test_no_key_is_found_made_or_used_while_an_attack_runs(ring: Keyring) -> None:
    locked = kept(ring).read_bytes()
    key, fresh = ring.own(), Keyring(ring.vault.parent / "new", folders=ring.folders)
    for ask in (
        again(ring).own,
        again(ring).require,
        fresh.own,
        lambda: key.unlock(locked, FILE),
        lambda: key.lock(b"another truth", FILE),
    ):
        with sealed(), pytest.raises(NotGranted, match="tried to open the vault"):
            ask()
    assert len(list(ring.folders[0].iterdir())) == 1
