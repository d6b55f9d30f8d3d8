"""Features and labels from the head alone, end to end: a torchvision ViT of which clients train the
head, and no false alarm on pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.core.errors import SpecError
from fedsim.core.files import read_json
from fedsim.core.run import Run
from tests.conftest import small_spec
from tests.staging import short_report

SMALL = "{patch_size: 8, hidden_dim: 96, num_layers: 2, num_heads: 4, mlp_dim: 192}"
TORCHVISION = [
    f"model={{name: 'torchvision.models:VisionTransformer', options: {SMALL}}}",
    "train.trainable=head",
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.report.write_report", short_report)


def audited(root: Path, *overrides: str) -> Run:
    attacks = "attacks=[{name: features}, {name: inverting_gradients, steps: 5}]"
    return audit(small_spec(attacks, *overrides), root / "run")


def test_the_head_of_a_torchvision_vit_tells_features_and_labels(tmp_path: Path) -> None:
    run = audited(tmp_path, *TORCHVISION)
    own = run.scores[run.scores["attack"] == "features"]
    assert (own["features"] > 0.9999).all()
    assert (own["label_recovered"] == own["label_true"]).all()
    assert not own["claimed"].any()
    assert (run.scores["canary"] == 0).all()
    verdicts = {v["attack"]: v for v in read_json(run.root / "summary.json")["verdicts"]}
    assert verdicts["features"]["verdict"] == "NOT RECOVERED"
    assert "claims no picture" in verdicts["features"]["words"]
    assert "cosine of 1.0000" in verdicts["features"]["words"]
    assert verdicts["inverting_gradients"]["verdict"] == "NOT RECOVERED"


def test_features_of_a_batch_come_back_with_their_labels_and_counts(tmp_path: Path) -> None:
    run = audited(tmp_path, *TORCHVISION, "train.batch_size=4")
    own = run.scores[run.scores["attack"] == "features"]
    assert (own["label_recovered"] == own["label_true"]).all()
    assert own["features"].mean() > 0.95
    assert (own["features"] > own["features_free"]).mean() > 0.9
    assert own["features_free"].max() < 0.95


def test_several_epochs_still_tell_most_labels(tmp_path: Path) -> None:
    steps = ["train.upload=delta", "train.local_epochs=2", "train.batch_size=2", "data.clients=64"]
    adam = ["train.optimizer=adam", "train.lr=0.001", "attacks=[{name: features}]"]
    run = audited(tmp_path, *TORCHVISION, *steps, *adam)
    own = run.scores[run.scores["attack"] == "features"]
    assert (own["label_recovered"] == own["label_true"]).mean() > 0.6


def test_a_frozen_head_is_refused_before_a_round(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"features needs the gradient of head\.weight"):
        audited(tmp_path, "train.trainable=norm")


def test_a_result_keeps_its_features(tmp_path: Path) -> None:
    from fedsim.core.attack import Reconstruction

    rows = torch.rand(2, 7)
    Reconstruction(torch.zeros(0, 3, 8, 8), features=rows).save(tmp_path / "r.safetensors")
    again = Reconstruction.load(tmp_path / "r.safetensors")
    assert again.features is not None
    assert torch.equal(again.features, rows)
