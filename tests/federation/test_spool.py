"""The spool: updates in memory or on disk, shown to a strategy as weights."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.core.learning import Update
from fedsim.core.observation import Public, write_observation
from fedsim.core.run import observation_path
from fedsim.core.spec import Spec
from fedsim.federation.spool import as_weights

SENT = {"head": torch.tensor([1.0, 2.0]), "mean": torch.zeros(2), "frozen": torch.ones(2)}


def update(kind: str) -> Update:
    return Update(kind, {"head": torch.tensor([2.0, -2.0])}, {"mean": torch.tensor([0.5, 0.5])})


@pytest.mark.parametrize(("kind", "moved"), [("gradient", [0.8, 2.2]), ("delta", [3.0, 0.0])])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_weights_are_what_was_sent_moved_by_the_update(
    kind: str, moved: list[float], where: str, tmp_path: Path
) -> None:
    source: Update | Path = update(kind)
    if where == "disk":
        write_observation(tmp_path, 1, 0, update(kind), Public.of(Spec(), num_classes=8))
        source = observation_path(tmp_path, 1, 0).with_suffix(".safetensors")
    record = as_weights(SENT, source, lr=0.1)
    np.testing.assert_allclose(record["head"].numpy(), moved, rtol=1e-6)
    np.testing.assert_array_equal(record["mean"].numpy(), [0.5, 0.5])  # a buffer is replaced
    np.testing.assert_array_equal(record["frozen"].numpy(), [1.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_move_the_weights_in_float32(dtype: torch.dtype) -> None:
    third = torch.tensor([1 / 3, 2 / 3]).to(dtype)
    record = as_weights(SENT, Update("gradient", {"head": third}), lr=0.1)
    expected = SENT["head"] - 0.1 * third.float()
    np.testing.assert_array_equal(record["head"].numpy(), expected.numpy())


@pytest.mark.parametrize("name", ["frozen", "mean", "head"])
def test_what_is_done_to_an_array_in_place_reaches_nothing_else(name: str) -> None:
    kept, source = {n: tensor.clone() for n, tensor in SENT.items()}, update("delta")
    record = as_weights(SENT, source, 0.1)
    before = record[name].numpy()
    changed = record[name].numpy()
    changed *= 7
    np.testing.assert_array_equal(record[name].numpy(), before)
    assert all(torch.equal(SENT[n], kept[n]) for n in SENT)


def test_an_array_reads_as_one_of_flowers_own() -> None:
    array = as_weights(SENT, update("delta"), 0.1)["head"]
    assert (array.dtype, array.shape, array.stype) == ("float32", (2,), "numpy.ndarray")
    np.testing.assert_array_equal(np.load(io.BytesIO(array.data), allow_pickle=False), [3.0, 0.0])


def test_a_file_that_took_the_place_of_another_is_read_again(tmp_path: Path) -> None:
    path = observation_path(tmp_path, 1, 0)
    heads = []
    for size in (1.0, 5.0):  # two runs of one process, one after the other in the same folder
        written = Update("delta", {"head": torch.full((2,), size)})
        write_observation(tmp_path, 1, 0, written, Public.of(Spec(), num_classes=8))
        heads.append(as_weights(SENT, path, lr=0.1)["head"].numpy().tolist())
        path.unlink()
    assert heads == [[2.0, 3.0], [6.0, 7.0]]
