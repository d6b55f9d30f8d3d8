"""Grids: who is which client, and what a client that fails answers."""

from __future__ import annotations

import pytest

from fedsim.core.errors import RunError
from fedsim.deploy import apps
from fedsim.federation.grids import InlineGrid, identify


@pytest.mark.parametrize(
    ("partitions", "expected"),
    [
        ([0, 7], "client 7, and there are clients 0 to 1 only"),
        ([0, -1], "client -1, and there are"),
        ([1, 1], "two nodes say they are client 1"),
    ],
)
def test_a_wrong_partition_id_is_one_sentence(partitions: list[int], expected: str) -> None:
    grid = InlineGrid(apps.client, 2)
    for context, partition in zip(grid.contexts.values(), partitions, strict=True):
        context.node_config["partition-id"] = partition
    with pytest.raises(RunError, match=expected):
        identify(grid, 2, 5.0)
