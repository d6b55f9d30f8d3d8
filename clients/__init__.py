"""The client side: data sets, shards, local training and evaluation as a Flower ClientApp.

Private pictures are read here, and what a client learned from goes into its vault. What is offered
to other rooms is imported when it is asked for: the app brings Flower, and the shards bring models.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "fedsim.clients":
    raise ModuleNotFoundError("import fedsim.clients: it is a part of fedsim.", name=__name__)

if TYPE_CHECKING:
    from fedsim.clients.app import ClientSide, DeployedSide, make_client_app
    from fedsim.clients.dealing import (
        deal,
        open_holding,
        read_public,
        read_tested,
        write_public,
    )
    from fedsim.clients.shards import (
        Holding,
        check_shards,
        draw_batches,
        images_of,
        shards_of,
        undealt,
    )

__all__ = [
    "ClientSide",
    "DeployedSide",
    "Holding",
    "check_shards",
    "deal",
    "draw_batches",
    "images_of",
    "make_client_app",
    "open_holding",
    "read_public",
    "read_tested",
    "shards_of",
    "undealt",
    "write_public",
]

_MODULES = {
    "app": ("ClientSide", "DeployedSide", "make_client_app"),
    "dealing": ("deal", "open_holding", "read_public", "read_tested", "write_public"),
    "shards": ("Holding", "check_shards", "draw_batches", "images_of", "shards_of", "undealt"),
}


def __getattr__(name: str) -> Any:
    for module, offered in _MODULES.items():
        if name in offered:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
