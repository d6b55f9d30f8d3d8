"""What tests of the board share: finished runs with a suite, and a page of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedsim.board import build_board
from fedsim.board.page import Built
from fedsim.core.run import Run
from fedsim.core.vault import Vault
from tests.canned import add_suite
from tests.report.conftest import make_run

WEAK, STRONG = ([{"name": "gaussian_noise", "std": std, "relative": True}] for std in (0.001, 0.3))
SIGNS = [{"name": "quantization", "kind": "sign"}]
HOSTILE = "<img src=x onerror=alert(1)>"


def made(
    root: Path, noise: float, accuracy: float | None = None, *, suite: Any = None, **spec: Any
) -> Run:
    """A finished run whose best attack leaves so much noise, and whose model is so accurate."""
    with pytest.MonkeyPatch.context() as patch:  # nobody looks at their reports
        patch.setattr("fedsim.report.write_report", lambda run, jobs, redacted: run.report)
        run = make_run(root, {"close": noise, "far": 0.45}, **spec)
    rows = [{"round": 1, "train_loss": 1.0, "test_accuracy": accuracy}]
    run.write_table("rounds", pd.DataFrame(rows))
    return add_suite(run, **(suite or {}))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One federation under four defenses, and another; tests only read them."""
    root = tmp_path_factory.mktemp("board")
    doubt = {"flags": [("no_better_than_guess", f"Its loss is a guess's {HOSTILE}.")]}
    return {
        "plain": made(root / "plain", 0.0, 0.6, suite={"auc": 0.7}),
        "weak": made(root / "weak", 0.02, 0.6, defenses=WEAK),
        "strong": made(root / "strong", 0.2, 0.3, defenses=STRONG),
        "better": made(root / "better", 0.3, 0.5, defenses=[{"name": "top_k", "sparsity": 0.9}]),
        "doubted": made(root / "doubted", 0.4, 0.6, defenses=SIGNS, suite=doubt),
        "wide": made(root / "wide", 0.1, 0.6, threat="D"),
    }


@pytest.fixture(scope="session")
def built(shelf: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The board of that shelf."""
    return build_board([run.root for run in shelf.values()], tmp_path_factory.mktemp("built"))


@pytest.fixture
def measured(small_run: Run, tmp_path: Path) -> Run:
    """A real run, whose observations can be published, with a suite."""
    root = tmp_path / "run"
    shutil.copytree(small_run.root, root)
    return add_suite(Run.open(root))


def images_of(run: Run, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """The true pictures of a run by observation, with so much noise on them."""
    coin, found = torch.Generator().manual_seed(0), {}
    for round_, client in run.scores[["round", "client"]].drop_duplicates().to_numpy().tolist():
        truth = Vault(run.vault).read(round_, client).images
        guess = truth + noise * torch.randn(truth.shape, generator=coin)
        found[f"round-{round_:04d}/client-{client:04d}"] = guess.clamp(0, 1)
    return found
