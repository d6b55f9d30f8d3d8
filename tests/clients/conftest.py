"""What tests of clients share: folders dealt to them, a machine without the data set."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from fedsim.clients.dealing import deal
from fedsim.core.spec import DataSpec, Spec


def dealt(spec: Spec, root: Path) -> list[Path]:
    folders = [root / str(client) for client in range(spec.data.clients)]
    deal(spec, folders)
    return folders


def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, whoever opens a data set fails."""

    def opened(data: DataSpec, split: str) -> NoReturn:
        pytest.fail(f"the {split} split of {data.name} was opened")

    for module in (
        "fedsim.clients.shards",
        "fedsim.clients.dealing",
        "fedsim.campaign.plan",
        "fedsim.campaign.surrogate",
        "fedsim.audit.stages",
    ):
        monkeypatch.setattr(f"{module}.images_of", opened)
    monkeypatch.setattr("fedsim.clients.shards.load_images", opened)
