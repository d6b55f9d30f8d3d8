"""What the fuzzers share: a run whose files are overwritten, and a watch on pickles."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from tests.conftest import small_spec


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every pickle that was opened: none."""
    found: list[str] = []

    def spy(name: str) -> Callable[..., None]:
        def refuse(*args: object, **kwargs: object) -> None:
            found.append(name)
            raise AssertionError(f"{name} was called")

        return refuse

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, spy(f"pickle.{name}"))
    monkeypatch.setattr(torch, "load", spy("torch.load"))
    yield found
    assert found == []


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose files are overwritten, one at a time."""
    spec = small_spec(
        "data.clients=2",
        "train={rounds: 1, clients_per_round: 2, evaluate: false}",
        "model.options={patch_size: 8, depth: 1, embed_dim: 48, num_heads: 2}",
        "defenses=[{name: top_k, sparsity: 0.5, feedback: true}]",
        "attacks=[{name: prior_only}]",
    )
    return audit(spec, tmp_path_factory.mktemp("fuzz") / "run")
