"""Serving: loopback alone, one address, until Ctrl-C."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn

from fedsim.core.errors import RunError, SpecError
from fedsim.viewer.server import listen, serve
from tests.viewing import ROOT


def test_other_addresses_than_loopback_are_refused(shelf: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(SpecError, match="loopback"):
            serve([shelf], host=host)


def test_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_the_command_prints_one_address_serves_and_ends_on_ctrl_c(shelf: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli", "view", str(shelf)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})", address)
        assert found, address
        asked = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        asked.request("GET", "/")
        assert asked.getresponse().read().count(b"\n") == 1
        asked.request("GET", f"/?token={found[2]}")
        answer = asked.getresponse()
        answer.read()
        cookie = {"Cookie": str(answer.headers["Set-Cookie"]).partition(";")[0]}
        asked.request("GET", "/", headers=cookie)
        assert b"done" in asked.getresponse().read()
        for path in ("/../../../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"):
            asked.request("GET", path, headers=cookie)
            answer = asked.getresponse()
            assert (answer.status, b"root:" in answer.read()) == (404, False)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert rest == ""
    assert "Traceback" not in errors
    assert "stopped." in errors


def test_every_start_has_a_token_of_its_own(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    addresses: list[str] = []
    for _ in range(3):
        serve([shelf], ready=addresses.append)
    tokens = {re.sub(r".*\?token=", "", address) for address in addresses}
    assert len(tokens) == 3
    assert min(map(len, tokens)) >= 32
