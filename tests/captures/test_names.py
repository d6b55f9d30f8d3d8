"""Arrays get the names of the model that was declared, or are said to be of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.core.errors import ModelError
from fedsim.defenses.applied import announced
from tests import flower_task as task
from tests.flower_app import App, bytes_of, captured, settled, updates


def as_list(state: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord.from_numpy_ndarrays([np.asarray(tensor) for tensor in state.values()])


def load_list(model: Any, record: ArrayRecord) -> None:
    values = [torch.tensor(array) for array in record.to_numpy_ndarrays()]
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def test_arrays_without_names_get_those_of_the_model(tmp_path: Path) -> None:
    app = App(arrays=as_list, load=load_list)
    plain = app.run(app.strategy(), 2)
    assert bytes_of(app.run(captured(app, tmp_path / "mine"), 2)) == bytes_of(plain)
    for _ in range(2):  # again, when the names are there already
        run = settled(tmp_path / "mine")
        seen = updates(run)
        assert set(seen[0].update.tensors) == {name for name, _ in task.Net().named_parameters()}
        assert "bn.running_mean" in seen[0].update.buffers
        assert len(seen) == 4
    named = App()
    named.run(captured(named, tmp_path / "named"), 2)
    others = updates(settled(tmp_path / "named"))
    for one, other in zip(seen[:2], others[:2], strict=True):  # later sums are of another order
        for name, tensor in other.update.tensors.items():
            assert torch.equal(one.update.tensors[name], tensor)
        for name, tensor in other.update.buffers.items():
            torch.testing.assert_close(one.update.buffers[name], tensor)


def test_another_model_than_the_one_trained_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine", model=task.Net), 1)
    with pytest.raises(ModelError, match="trains another model than the one declared"):
        settled(tmp_path / "mine")


class Tied(nn.Module):
    """Two layers with one weight, under two names."""

    def __init__(self) -> None:
        super().__init__()
        size = 3 * task.SIDE**2
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(size, task.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        seen = torch.sigmoid(self.first(images.flatten(1)))
        logits: Tensor = self.fc(torch.sigmoid(self.second(seen)))
        return logits


def test_a_weight_that_two_layers_share_has_two_names(tmp_path: Path) -> None:
    app = App(model=Tied, examples=3)
    app.run(captured(app, tmp_path / "mine"), 1)
    for seen in updates(settled(tmp_path / "mine")):
        assert "first.weight" in seen.update.tensors
        assert "second.weight" not in seen.weights
        announced(seen.public).load_state_dict(seen.weights)
