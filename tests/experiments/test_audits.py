"""Whole audits from the specs that come with the project, on data in its own layout, with every
metric filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from fedsim.core.spec import load_spec
from tests.clients.data.test_celeba import Celeba, celeba

__all__ = ["celeba"]

AUDITS = Path(__file__).parents[2] / "experiments" / "audits"
IMAGENET = Path(__file__).parents[3] / "shared" / "data" / "imagenet"


def check(run: Run, victims: int) -> None:
    scores = run.scores
    exact = scores[scores["attack"] == "patch_solve"]
    assert len(exact) == victims
    assert exact["psnr"].min() > 40
    assert (exact["identified"] == 1).all()
    assert float(exact["lpips"].max()) < 0.01
    guess = scores[scores["attack"] == "prior_only"]
    assert float(guess["lpips"].min()) > 0.2
    assert not any(run.summary["unavailable"].values())


@pytest.mark.skipif(not IMAGENET.is_dir(), reason="there are no ImageNet pictures here")
def test_imagenet_is_audited_with_lpips_and_identification(
    real_weights: None, tmp_path: Path
) -> None:
    smaller = ["data.image_size=64", "model.options={patch_size: 8, depth: 2}"]
    spec = load_spec(AUDITS / "imagenet.yaml", [f"data.path={IMAGENET}", *smaller])
    run = audit(spec, tmp_path / "run")
    check(run, victims=4)
    told = run.summary["verdicts"][0]["identification"]
    assert told["gallery"] >= 100
    assert told["chance"] < 0.2
    assert told["by_chance"] < 0.01


def test_celeba_is_audited_with_lpips_and_identification(
    real_weights: None, celeba: Celeba, tmp_path: Path
) -> None:
    quick = ["attacks=[{name: patch_solve}]", "data.clients=3", "audit.victims=3"]
    spec = load_spec(AUDITS / "celeba.yaml", [f"data.path={celeba.root}", *quick])
    check(audit(spec, tmp_path / "run"), victims=3)
