"""Pictures that are searched apart in every epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.attacks.matching.epochs import agreement, partnered, spread_rows
from fedsim.audit.stages import audit
from fedsim.core.attack import Reconstruction
from tests.conftest import small_spec
from tests.staging import short_report


def test_steps_take_pictures_at_equal_distances_in_every_epoch() -> None:
    rows = spread_rows(5, 2, 2)
    assert rows == [[0, 3], [1, 4], [2], [5, 8], [6, 9], [7]]


def test_epochs_that_show_the_same_pictures_in_another_order_agree() -> None:
    pictures = torch.rand(1, 3, 3, 8, 8)
    again = torch.cat([pictures, pictures[:, [2, 0, 1]]], 1)
    other = torch.cat([pictures, torch.rand(1, 3, 3, 8, 8)], 1)
    prior = agreement(1.0, 2).penalty
    assert float(prior(again, 0.0)) < 1e-10 < float(prior(other, 0.0))


def test_partners_are_found_within_a_label_and_averaged() -> None:
    pictures, labels = torch.rand(3, 3, 8, 8), torch.tensor([0, 0, 1])
    noise = 0.01 * torch.randn(3, 3, 8, 8)
    both = torch.cat([pictures, (pictures + noise)[[1, 0, 2]]])
    mean = partnered(both, labels, 2)
    assert torch.allclose(mean, pictures + noise / 2, atol=1e-6)


def test_a_search_over_epochs_says_what_it_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.report.write_report", short_report)
    attack = "attacks=[{name: inverting_gradients, order: free, steps: 4}]"
    steps = ["train.upload=delta", "train.local_epochs=2", "train.batch_size=2", "train.rounds=1"]
    run = audit(small_spec(attack, *steps, "data.clients=128", "audit.victims=1"), tmp_path / "run")
    own = run.scores[run.scores["attack"] == "inverting_gradients"]
    assert len(own) == 4
    assert own["claimed"].all()
    (result,) = run.root.glob("reconstructions/inverting_gradients/**/*.safetensors")
    (note,) = [n for n in Reconstruction.load(result).notes if "local steps" in n]
    assert "4 local steps on 4 unknown pictures, searched apart in 2 epochs" in note
    assert "no clear picture at this budget" in note
