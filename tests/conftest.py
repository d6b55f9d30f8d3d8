"""Shared pieces of the tests: a small spec that runs in a second, and its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.auditing import audit
from fedsim.core.spec import Spec, load_spec
from fedsim.core.store import Run

SMALL = [
    "seed=1",
    "data={image_size: 32, clients: 4}",
    "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
    "train={rounds: 2, clients_per_round: 2, lr: 0.05, evaluate: false}",
    "threat=C",
    "attacks=[{name: patch_solve}]",
    "engine={kind: inline, device: cpu}",
]


def small_spec(*overrides: str) -> Spec:
    """A federation of four clients and a tiny ViT, in this process."""
    return load_spec({}, [*SMALL, *overrides])


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    import os

    os.environ["FEDSIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One finished audit; tests only read it."""
    root: Path = tmp_path_factory.mktemp("small") / "run"
    return audit(small_spec(), root)
