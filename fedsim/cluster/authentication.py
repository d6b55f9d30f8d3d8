"""Authentication: a Ray of ours may be used by whoever has the token in the user's cache.

Ray listens on every interface of a machine, and runs what it is sent. Its token authentication is
off by default, so it is switched on for each Ray that is started here. A token travels in clear:
ours is sent to what was started here, a user's own (RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH) to the
cluster that it was named for (RAY_ADDRESS), and neither to any other address, whatever asks there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
from ray import _raylet

from fedsim.core.cache import cache_folder
from fedsim.core.errors import RunError

MODE, PATH, ADDRESS = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"
_ANY_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # of a Ray's head; harmless


def token_file() -> Path:
    """The file of the user's token, made when it is first needed."""
    file = cache_folder() / "ray-token"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was quicker: its token holds
            os.link(draft, file)
        draft.unlink()
    if file.stat().st_mode & 0o077:
        raise RunError(
            f"the token in '{file}' is open to others; delete it, and a new one is made."
        )
    if len(file.read_text().strip()) < 32:  # Ray would end this process over it
        raise RunError(f"the token in '{file}' is too short; delete it, and a new one is made.")
    return file


def settings() -> dict[str, str]:
    """The environment in which a Ray must be started to ask for the token."""
    return {} if MODE in os.environ else {MODE: "token", PATH: str(token_file())}


def settings_for(address: str, *, ours: bool, seconds: float = 5) -> dict[str, str]:
    """The environment that a running cluster wants; raises soon where there is no Ray, and where a
    token is asked for that is not meant for it."""
    own = MODE in os.environ
    trusted = ours or (own and os.environ.get(ADDRESS) == address)
    by_client = address.startswith("ray://")  # which asks in another way
    refused = not by_client and knock(address, seconds=seconds)
    if not trusted:
        if refused:
            raise RunError(
                f"it asks for a token, and none was named for it; where it is yours, set "
                f"{ADDRESS}={address}, {MODE}=token and {PATH}"
            )
        return {MODE: "disabled"} if own else {}
    if own or not refused:
        return {}
    with_token = settings()
    if knock(address, token_file().read_text(), seconds):
        raise RunError(
            f"it asks for another token; set {ADDRESS}={address}, {MODE}=token and {PATH}"
        )
    return with_token


def knock(address: str, token: str = "", seconds: float = 5) -> bool:
    """Whether a Ray at an address refuses the token; an error where there is no Ray."""
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
            bearer = (("authorization", f"Bearer {token}"),) if token else ()
            channel.unary_unary(_ANY_METHOD)(b"", timeout=seconds, metadata=bearer)
        except grpc.FutureTimeoutError:
            raise RunError("what listens there is no Ray") from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise RunError(f"what listens there is no Ray ({error.code().name})") from None
    return False


@contextmanager
def applied(chosen: Mapping[str, str]) -> Iterator[None]:
    """Ray's settings for a while. Ray reads them on import, and is made to read them again."""
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    # Ray has no public way. Flower allows one release of it, with which these names were checked.
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
    _raylet.Config.initialize("")  # type: ignore[attr-defined]
