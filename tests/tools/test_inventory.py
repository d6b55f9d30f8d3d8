"""The inventory: everything that can be named is told."""

from __future__ import annotations

from fedsim.clients.data.datasets import dataset_names
from fedsim.tools.inventory import INVENTORY


def test_every_data_set_is_listed_with_what_it_is() -> None:
    listed = INVENTORY["data"]()
    assert list(listed) == dataset_names()
    assert all(listed.values())
