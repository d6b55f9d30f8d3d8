"""Keys and certificates of a deployment."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedsim.core.errors import RunError
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
