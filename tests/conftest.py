"""Shared pieces of the tests: a small spec that runs in a second, and its run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.core.cache import weights_folder
from fedsim.core.metrics import perceptual
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec
from tests.traces import assert_no_process_with

SMALL = [
    "seed=1",
    "data={image_size: 32, clients: 4}",
    "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
    "train={rounds: 2, clients_per_round: 2, lr: 0.05, evaluate: false}",
    "threat=C",
    "attacks=[{name: patch_solve}]",
    "engine={kind: inline, device: cpu}",
]
REAL_WEIGHTS = weights_folder()  # before the tests look elsewhere


def small_spec(*overrides: str) -> Spec:
    """A federation of four clients and a tiny ViT, in this process."""
    return load_spec({}, [*SMALL, *overrides])


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's own cache or keeps keys there, none finds weights but those
    that ask, and none leaves a process behind."""
    cache = tmp_path_factory.mktemp("cache")
    os.environ["FEDSIM_CACHE"] = str(cache)
    os.environ["FLWR_HOME"] = str(cache / "flwr")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "torch")
    os.environ["FEDSIM_WEIGHTS"] = str(tmp_path_factory.mktemp("weights"))
    os.environ["FEDSIM_VAULT_KEYS"] = str(tmp_path_factory.mktemp("keys"))
    yield
    assert_no_process_with(f"FEDSIM_CACHE={cache}")


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores it, and so does its child."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine on which nothing was fetched."""
    monkeypatch.setenv("FEDSIM_WEIGHTS", str(tmp_path / "weights"))
    perceptual.load_network.cache_clear()
    yield
    perceptual.load_network.cache_clear()


@pytest.fixture
def real_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LPIPS's own backbone, where `fedsim weights fetch` was run (`make setup` does)."""
    monkeypatch.setenv("FEDSIM_WEIGHTS", str(REAL_WEIGHTS))
    perceptual.load_network.cache_clear()
    if reason := perceptual.lpips_unavailable():
        pytest.skip(reason)
    yield
    perceptual.load_network.cache_clear()


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One finished audit; tests only read it."""
    root: Path = tmp_path_factory.mktemp("small") / "run"
    return audit(small_spec(), root)
