"""Updates with which nothing can be done are left out, and whoever sent them is told why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedsim.core.errors import RunError
from tests import flower_task as task
from tests.flower_app import App, captured, settled


class Takes(FedAvg):
    """Aggregates nothing."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return (None, None) if list(replies) else None


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_what_is_no_weights_is_refused_at_once(tmp_path: Path, scale: float) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        after, before = (r.to_torch_state_dict() for r in (content["arrays"], weights))
        apart = {name: scale * (tensor - before[name]) for name, tensor in after.items()}
        content["arrays"] = ArrayRecord(apart)
        return content

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(Takes)), 1)
    with pytest.raises(RunError, match="have the app's clients upload weights"):
        settled(tmp_path / "mine")
