"""The loupe on position embeddings: each measure on a case worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedsim.audit.stages import federate
from fedsim.cli import app
from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import RunError
from fedsim.core.models import build_model
from fedsim.core.run import Run
from fedsim.defenses.applied import prepared
from fedsim.defenses.mjp import Mjp, coordinates, puzzle_of
from fedsim.tools.positions import analyse, explained_variance, regression_error, shuffling
from tests.conftest import small_spec
from tests.staging import TINY


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return federate(small_spec(), tmp_path_factory.mktemp("positions") / "run")


def test_variance_of_a_plane_is_in_two_directions() -> None:
    coin = torch.Generator().manual_seed(0)
    plane = torch.randn(40, 2, generator=coin) @ torch.randn(2, 30, generator=coin)
    shares = explained_variance(plane.double())
    assert float(shares[:2].sum()) == pytest.approx(1.0)
    assert float(shares[0]) < 1.0


def test_a_place_that_is_written_linearly_is_read_exactly_and_noise_is_not() -> None:
    coin = torch.Generator().manual_seed(0)
    places = coordinates((8, 8)).double()
    rows = places @ torch.randn(2, 48, generator=coin).double()
    assert regression_error(rows, places) < 1e-6
    noise = torch.randn(64, 48, generator=coin).double()
    assert regression_error(noise, places) > 0.2


@pytest.mark.slow
def test_without_shuffling_nothing_moves(trained: Run) -> None:
    found = analyse(trained.root, pictures=12)
    assert (found.ratios[0], found.diff_norm[0], found.consistency[0]) == (0.0, 0.0, 1.0)
    assert found.diff_norm[-1] > 0
    assert found.eigenvalues == sorted(found.eigenvalues)
    for picture in ("positions.png", "umap.png"):
        assert (trained.root / "positions" / picture).stat().st_size > 1000
    told = json.loads((trained.root / "positions" / "positions.json").read_text())
    assert told["pictures"] == 12


def test_a_model_is_told_of_a_shuffling_while_it_is_measured_alone() -> None:
    defense = Mjp(ratio=0.5, index=True)
    net = prepared(build_model(TINY, image_size=32, num_classes=8, seed=0), [defense]).eval()
    spec, parts = small_spec(), vit_parts(net)
    told, original = [], type(net)._pos_embed

    def listen(self: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        told.append((puzzle_of(net).mask, puzzle_of(net).order))
        return original(self, tokens)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(net), "_pos_embed", listen)
        shuffling(net, spec, parts.grid, 0.5, 2)
    assert [mask is None for mask, _ in told] == [True, False] * 2
    for mask, order in told[1::2]:
        assert not torch.equal(order[mask], torch.arange(16)[mask])
        assert torch.equal(order[~mask], torch.arange(16)[~mask])
    assert (puzzle_of(net).mask, puzzle_of(net).order) == (None, None)


def test_without_positions_every_prediction_stays(tmp_path: Path) -> None:
    bare = "defenses=[{name: mjp, positions: false}]"
    run = federate(small_spec(bare), tmp_path / "run")
    found = analyse(run.root, pictures=8)
    assert found.consistency == [1.0] * len(found.ratios)
    assert max(found.diff_norm) < 1e-3


def test_the_command_tells_it(trained: Run, tmp_path: Path) -> None:
    words = ["analyze", "pe", str(trained.checkpoint), "--pictures", "4", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Consistency" in result.stdout
    assert (tmp_path / "positions.json").is_file()
    convnet = small_spec("model={name: convnet, options: {channels: [4]}}")
    other = federate(convnet, tmp_path / "r")
    with pytest.raises(Exception, match="no ViT"):
        analyse(other.root)
    other.checkpoint.unlink()
    with pytest.raises(RunError, match="no checkpoint"):
        analyse(other.root)
