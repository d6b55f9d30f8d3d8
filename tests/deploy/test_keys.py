"""Keys and certificates of a deployment."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedsim.core.errors import RunError
from fedsim.core.files import UNFINISHED, write_atomically
from fedsim.deploy.keys import HOSTS, check_keys, make_keys


def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", 2)
    check_keys(keys, 2)
    for path in (keys.server_key, keys.node(0), keys.node(1)):
        assert path.stat().st_mode & 0o777 == 0o600
    assert keys.root.stat().st_mode & 0o777 == 0o700
    assert keys.node_public(1).read_text().startswith("ecdsa-sha2-nistp384 ")


def test_keys_that_are_there_are_kept_and_more_nodes_get_their_own(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_keys(tmp_path, 2)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    check_keys(keys, 2)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
@pytest.mark.parametrize("host", HOSTS)
def test_openssl_agrees_that_the_certificate_is_the_hosts(tmp_path: Path, host: str) -> None:
    keys = make_keys(tmp_path, 0)
    kind = "-verify_ip" if host[0].isdigit() else "-verify_hostname"
    command = ["openssl", "verify", "-purpose", "sslserver", "-x509_strict"]
    command += ["-CAfile", str(keys.authority), kind]
    good = subprocess.run([*command, host, str(keys.certificate)], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    other = "127.0.0.9" if host[0].isdigit() else "elsewhere"
    assert subprocess.run([*command, other, str(keys.certificate)], capture_output=True).returncode


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    keys, other = make_keys(tmp_path / "one", 1), make_keys(tmp_path / "other", 1)
    shutil.copy(other.certificate, keys.certificate)
    with pytest.raises(RunError, match="was not signed by"):
        check_keys(keys, 1)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    keys, other = make_keys(tmp_path / "one", 1), make_keys(tmp_path / "other", 1)
    shutil.copy(other.server_key, keys.server_key)
    with pytest.raises(RunError, match="is not the key of"):
        check_keys(keys, 1)


@pytest.mark.parametrize("name", ["ca.pem", "server.key", "node-1"])
def test_missing_keys_are_named(tmp_path: Path, name: str) -> None:
    keys = make_keys(tmp_path, 2)
    (tmp_path / name).unlink()
    with pytest.raises(RunError, match=rf"{name}' is missing"):
        check_keys(keys, 2)


@pytest.mark.parametrize("name", ["ca.pem", "server.key"])
def test_broken_keys_are_named(tmp_path: Path, name: str) -> None:
    keys = make_keys(tmp_path, 2)
    (tmp_path / name).write_text("nothing")
    with pytest.raises(RunError, match=f"{name}' holds no"):
        check_keys(keys, 2)


def test_a_node_key_of_another_pair_is_refused(tmp_path: Path) -> None:
    keys, other = make_keys(tmp_path / "one", 2), make_keys(tmp_path / "other", 2)
    shutil.copy(other.node_public(1), keys.node_public(1))
    with pytest.raises(RunError, match=r"node-1\.pub' is not the public half of '.*node-1'"):
        check_keys(keys, 2)
    keys.node_public(1).unlink()
    check_keys(make_keys(keys.root, 2), 2)


@pytest.mark.parametrize("name", ["server.key", "node-0", "node-1"])
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_private_key_that_others_can_read_is_refused(
    tmp_path: Path, name: str, mode: int
) -> None:
    keys = make_keys(tmp_path, 2)
    (tmp_path / name).chmod(mode)
    with pytest.raises(RunError, match=rf"{name}' is open to others \(mode {mode:04o}\)"):
        check_keys(keys, 2)


def test_a_node_key_without_its_public_half_gets_it_again(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 1)
    before = keys.node(0).read_bytes(), keys.node_public(0).read_bytes()
    keys.node_public(0).unlink()
    with pytest.raises(RunError, match=r"node-0\.pub' is missing; make it with `fedsim keys"):
        check_keys(keys, 1)
    check_keys(make_keys(tmp_path, 1), 1)
    assert (keys.node(0).read_bytes(), keys.node_public(0).read_bytes()) == before


def test_a_public_half_whose_private_one_is_elsewhere_is_not_replaced(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 1)
    keys.node(0).unlink()
    before = keys.node_public(0).read_bytes()
    with pytest.raises(RunError, match="is there without its private half"):
        make_keys(tmp_path, 1)
    assert keys.node_public(0).read_bytes() == before


@pytest.mark.parametrize("writes", range(7))
def test_keys_that_were_cut_short_between_any_two_files_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """A kill after some of the seven files, and in the middle of the next."""
    written = []

    def until_killed(path: Path, content: bytes, mode: int = 0o644) -> None:
        if len(written) == writes:
            (path.parent / f".{path.name}.x{UNFINISHED}").write_bytes(content[:5])
            raise KeyboardInterrupt
        written.append(path)
        write_atomically(path, content, mode)

    with monkeypatch.context() as patch:
        patch.setattr("fedsim.deploy.keys.write_atomically", until_killed)
        with pytest.raises(KeyboardInterrupt):
            make_keys(tmp_path, 2)
    check_keys(make_keys(tmp_path, 2), 2)
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize("name", ["server.key", "server.pem"])
def test_what_cannot_be_signed_again_is_not_said_to_be(tmp_path: Path, name: str) -> None:
    keys = make_keys(tmp_path, 0)
    (tmp_path / name).unlink()
    with pytest.raises(RunError, match=f"{name}' is missing; nobody can sign it anew"):
        check_keys(keys, 0)


@pytest.mark.parametrize("name", ["node-0", "node-0.pub"])
def test_broken_node_keys_are_named(tmp_path: Path, name: str) -> None:
    keys = make_keys(tmp_path, 1)
    (tmp_path / name).write_text("nothing")
    with pytest.raises(RunError, match=f"{name}' holds no (private|public) key"):
        check_keys(keys, 1)
