"""Notebooks: pages of a long search, whole or started afresh."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsim.core.ledger import Ledger
from fedsim.core.notebook import Notebook, optimizer_tensors, restore_optimizer


def test_a_damaged_notebook_is_started_afresh(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_bytes(b"not a page")
    assert Notebook(path).load() is None
    assert not path.exists()


def test_a_page_is_replaced_as_a_whole_and_others_stand_beside_it(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path / "page.safetensors")
    assert notebook.load() is None
    notebook.page("first").save({"x": torch.ones(2)}, {"step": 1})
    for step in (2, 3):
        notebook.save({"x": torch.full((2,), float(step))}, {"step": step})
    tensors, about = notebook.load() or ({}, {})
    assert tensors["x"].tolist() == [3.0, 3.0]
    assert about == {"step": 3}
    other = notebook.page("first").load()
    assert other is not None
    assert other[1] == {"step": 1}
    notebook.clear()
    assert notebook.load() is None
    assert not notebook.damaged


def test_who_goes_on_from_a_page_has_read_what_it_rests_on(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    Notebook(path, Ledger(["weights", "update"])).page("first").save({"x": torch.ones(1)}, {})
    later = Ledger(["image_size"])
    assert Notebook(path, later).load() is None
    assert list(later) == ["image_size"]
    assert Notebook(path, later).page("first").load() is not None
    assert list(later) == ["image_size", "weights", "update"]


def test_a_page_from_before_rests_on_the_update(tmp_path: Path) -> None:
    path, ledger = tmp_path / "page.safetensors", Ledger()
    Notebook(path).save({"x": torch.ones(1)}, {})
    assert Notebook(path, ledger).load() is not None
    assert list(ledger) == ["update"]


def test_an_optimiser_goes_on_from_a_page(tmp_path: Path) -> None:
    def steps(optimizer: torch.optim.Adam, x: torch.Tensor, count: int) -> None:
        for _ in range(count):
            x.grad = 2 * x.detach()
            optimizer.step()

    whole = torch.ones(3, requires_grad=True)
    steps(torch.optim.Adam([whole], lr=0.1), whole, 5)
    x = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    steps(optimizer, x, 2)
    notebook = Notebook(tmp_path / "page.safetensors")
    notebook.save(optimizer_tensors(optimizer), {})
    fresh = torch.optim.Adam([x], lr=0.1)
    page = notebook.load()
    assert page is not None
    restore_optimizer(fresh, page[0])
    steps(fresh, x, 3)
    assert torch.equal(x, whole)
