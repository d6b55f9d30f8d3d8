"""A witnessed loader yields what it yields, and what it yielded is in its client's vault."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fedsim
from fedsim.captures.passes import NO_PASS, Pass, as_pictures, read_passes
from fedsim.captures.trouble import CaptureWarning
from fedsim.captures.witness import settle_witnesses
from tests import flower_task as task


def context(run_id: int = 7, node_id: int = 3, **config: Any) -> Any:
    return SimpleNamespace(
        run_id=run_id, node_id=node_id, node_config={"partition-id": 0}, run_config=config
    )


def kept(folder: Path, run_id: int = 7) -> list[Pass]:
    settle_witnesses()
    passes, wrong = read_passes([folder], run_id)
    assert not wrong
    return sorted(passes, key=lambda one: one.about.began)


def as_dicts(batches: Any, *names: str) -> list[dict[str, Any]]:
    return [dict(zip(names, batch, strict=True)) for batch in batches]


def test_it_yields_exactly_what_the_loader_yields(tmp_path: Path) -> None:
    plain = list(task.loader(0, 7, 3))
    loader = fedsim.witness(task.loader(0, 7, 3), context(), vault=tmp_path)
    seen = list(loader)
    assert len(loader) == 3
    assert len(loader.dataset) == 7
    assert loader.batch_size == 3
    for (images, labels), (own, targets) in zip(plain, seen, strict=True):
        assert torch.equal(images, own)
        assert torch.equal(labels, targets)


@pytest.mark.parametrize("told", [True, False])
def test_what_was_seen_is_kept_in_order_and_once(tmp_path: Path, told: bool) -> None:
    colours = {"mean": task.MEAN, "std": task.STD} if told else {}
    loader = fedsim.witness(task.loader(0, 6, 3), context(), vault=tmp_path, **colours)
    seen = [list(loader) for _ in range(2)]
    first, second = kept(tmp_path)
    assert len(first.stored if told else first.loose) == 6
    assert len(second.stored) == len(second.loose) == 0  # shuffled, and all known
    pictures = as_pictures(first.stored if told else first.loose, task.MEAN, task.STD)
    numbers = first.about.stored if told else first.about.loose
    for one, batches in ((first, seen[0]), (second, seen[1])):
        assert one.about.exhausted
        for rows, (images, labels) in zip(one.about.rows, batches, strict=True):
            at = [numbers.index(row) for row in rows]
            assert torch.equal(first.labels[at], labels)
            replayed = (pictures[at] - 0.5) / 0.25
            torch.testing.assert_close(replayed, images, rtol=0, atol=0 if told else 1e-6)


@pytest.mark.parametrize(
    "names", [("img", "label"), ("image", "label"), ("pixel_values", "labels")]
)
def test_batches_of_dictionaries_are_kept_too(tmp_path: Path, names: tuple[str, str]) -> None:
    plain = list(task.loader(0, 4, 2))
    list(fedsim.witness(as_dicts(plain, *names), context(), vault=tmp_path))
    (one,) = kept(tmp_path)
    assert torch.equal(one.loose, torch.cat([images for images, _ in plain]))
    assert torch.equal(one.labels, torch.cat([labels for _, labels in plain]))


def test_a_loader_that_is_left_before_its_end_says_so(tmp_path: Path) -> None:
    loader = fedsim.witness(task.loader(0, 6, 2), context(), vault=tmp_path)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    (one,) = kept(tmp_path)
    assert not one.about.exhausted
    assert len(one.about.rows) == 2


def test_a_batch_that_is_changed_in_place_was_seen_as_it_came(tmp_path: Path) -> None:
    whole = torch.cat([images for images, _ in task.loader(0, 4, 2)])
    for images, _ in fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path):
        images.mul_(0)
    assert torch.equal(kept(tmp_path)[0].loose, whole)


def test_what_it_keeps_is_encrypted(tmp_path: Path) -> None:
    list(fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path))
    kept(tmp_path)
    (file,) = tmp_path.rglob("*.safetensors")
    assert file.read_bytes().startswith(b"fedsim vault 1\n")
    assert file.parent.parent.stat().st_mode & 0o777 == 0o700


def test_batches_it_cannot_read_are_a_warning_and_are_yielded(tmp_path: Path) -> None:
    batches = ["one", "two"]
    with pytest.warns(CaptureWarning, match="a str is no pair"):
        assert list(fedsim.witness(batches, context(), vault=tmp_path)) == batches
    (one,) = kept(tmp_path)
    assert "a str is no pair" in str(one.about.lost)


def test_a_context_that_says_nothing_leaves_the_loader_alone() -> None:
    loader = task.loader(0, 4, 2)
    with pytest.warns(CaptureWarning, match="a loader has no witness"):
        assert fedsim.witness(loader, None) is loader


def test_a_vault_that_cannot_be_written_costs_the_truth_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loader = fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path / "file")

    def whole() -> list[Any]:
        seen = list(loader)
        settle_witnesses()
        return seen

    with pytest.warns(CaptureWarning, match="could not keep a pass"):
        assert len(whole()) == 2


def test_an_error_of_the_loader_is_its_own(tmp_path: Path) -> None:
    def broken() -> Any:
        yield torch.zeros(1, 3, 4, 4), torch.zeros(1, dtype=torch.long)
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        list(fedsim.witness(SimpleLoader(broken), context(), vault=tmp_path))


class SimpleLoader:
    def __init__(self, make: Any):
        self.make = make

    def __iter__(self) -> Any:
        return self.make()


def test_next_on_its_iterator_works_as_on_theirs(tmp_path: Path) -> None:
    loader = fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path)
    batches = iter(loader)
    assert next(batches)[0].shape == (2, 3, task.SIDE, task.SIDE)
    assert len(batches) == 2  # type: ignore[arg-type]
    assert isinstance(task.loader(0, 4, 2), DataLoader)


def test_more_than_it_may_keep_is_lost_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_WITNESS_GB", "0.000001")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        loader = fedsim.witness(task.loader(0, 8, 2), context(), vault=tmp_path)
        assert len(list(loader)) == 4
        (one,) = kept(tmp_path)
    assert "more than" in str(one.about.lost)
    assert not one.about.rows


def test_the_folder_can_be_said_in_the_run_config(tmp_path: Path) -> None:
    said = {"fedsim-witness": str(tmp_path / "here")}
    list(fedsim.witness(task.loader(0, 2, 2), context(**said)))
    assert len(kept(tmp_path / "here")) == 1


class Data:
    """A loader of anybody's, gone when it was used."""

    def __init__(self, batches: Any):
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_a_loader_that_takes_the_place_of_another_is_another(tmp_path: Path) -> None:
    batches = [(torch.rand(2, 3, 4, 4), torch.arange(2))]
    for _ in range(4):  # each is gone before the next, which may have its id
        list(fedsim.witness(Data(batches), context(), vault=tmp_path))
    assert len({one.about.loader for one in kept(tmp_path)}) == 4


def test_the_same_loader_is_the_same_by_whatever_way(tmp_path: Path) -> None:
    loader = task.loader(0, 4, 2)
    for one in (loader, iter(loader), fedsim.witness(loader, context(), vault=tmp_path)):
        list(fedsim.witness(one, context(), vault=tmp_path))
    passes = kept(tmp_path)
    assert [len(passes), len({one.about.loader for one in passes})] == [4, 1]


def test_a_witness_of_an_earlier_round_sees_no_later_one(tmp_path: Path) -> None:
    loader = task.loader(0, 4, 2)
    for _ in range(3):  # as an app does that keeps its loader
        loader = fedsim.witness(loader, context(), vault=tmp_path)
        list(loader)
    passes = kept(tmp_path)
    assert [len(passes), len({one.about.source for one in passes})] == [3, 3]


def test_a_loader_that_was_never_gone_through_is_known_of(tmp_path: Path) -> None:
    unused = fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path)
    (silent,) = kept(tmp_path)
    assert silent.about.number == NO_PASS
    assert "no pass through its loader came to an end" in str(silent.about.lost)
    list(unused)
    (one,) = kept(tmp_path)
    assert one.about.lost is None
