"""The cells of a bench: every defense at every strength, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.bench.cells import load_bench
from fedsim.core.errors import SpecError
from tests.bench.conftest import BENCH
from tests.conftest import SMALL


def test_every_defense_and_strength_is_a_cell_and_so_is_none() -> None:
    bench = load_bench({}, BENCH)
    assert [cell.label for cell in bench.cells()] == [
        "none",
        "gaussian_noise std 0.0",
        "gaussian_noise std 1.0 relative",
        "mjp ratio 0.5 probability 1.0",
    ]
    assert len({cell.folder for cell in bench.cells()}) == 4
    utility = bench.trained(next(bench.cells()))
    assert (utility.train.rounds, utility.train.evaluate) == (2, True)


def labels(axes: str) -> list[str]:
    bench = load_bench({}, [*BENCH, f"bench={{defenses: [{axes}]}}"])
    cells = list(bench.cells())
    assert len({cell.folder for cell in cells}) == len(cells)
    return [cell.label for cell in cells][1:]


def test_no_two_cells_share_a_label_or_a_folder() -> None:
    noise = "name: gaussian_noise, strengths: [{std: 0.1}]"
    beside = "with: [{name: clipping, norm: 1.0}]"
    assert labels(f"{{{noise}}}, {{{noise}, {beside}}}") == [
        "gaussian_noise std 0.1",
        "gaussian_noise std 0.1 with clipping norm 1.0",
    ]
    assert labels("{name: x, levers: [train.batch_size=2, audit.trials=2, seed=5]}") == [
        "x train.batch_size=2",
        "x audit.trials=2",
        "x 5",
    ]
    assert labels("{name: x, levers: [seed=2]}, {name: x, levers: [audit.trials=2]}") == [
        "x seed=2",
        "x audit.trials=2",
    ]
    assert labels("{name: a-b, levers: [seed=2]}, {name: a b, levers: [seed=2]}") == [
        "a-b 2",
        "a b 2",
    ]
    long = 200 * "x"
    assert max(len(c.folder) for c in load_bench({}, [*BENCH, _lever(long)]).cells()) < 200


def _lever(name: str) -> str:
    return f"bench={{defenses: [{{name: {name}, levers: [seed=2]}}]}}"


@pytest.mark.parametrize(
    "section",
    [
        "defenses: [{name: mjp}, {name: mjp}]",
        "defenses: [{name: clipping, strengths: [{norm: 1.0}, {norm: 1.0}]}]",
        "defenses: [{name: none, levers: [seed=]}]",
        "defenses: [{name: a b, levers: [seed=2]}, {name: a, levers: [name=b 2]}]",
        "defenses: [{name: mjp}], seeds: [1, 1]",
    ],
)
def test_cells_that_cannot_be_told_apart_are_refused(section: str) -> None:
    with pytest.raises(SpecError, match="two cells are called"):
        load_bench({}, [*BENCH, f"bench={{{section}}}"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (SMALL, "section 'bench'"),
        ([*SMALL, "bench={defences: []}"], "bench"),
        ([*SMALL, "bench={defenses: [{name: mjpp}]}"], "did you mean 'mjp'"),
        ([*SMALL, "bench={defenses: [{name: top_k, strengths: [{sparsity: 1.0}]}]}"], "sparsity"),
        ([*BENCH, "defenses=[{name: frozen_pe}]"], "under bench.defenses"),
    ],
)
def test_a_bad_bench_is_one_sentence(overrides: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_bench({}, overrides)


def test_a_lever_of_the_spec_is_a_cell_like_a_defense(tmp_path: Path) -> None:
    axis = "{name: batch size, levers: [train.batch_size=2, train.batch_size=3]}"
    bench = load_bench({}, [*BENCH, f"bench={{defenses: [{axis}]}}"])
    cells = list(bench.cells())
    assert [cell.label for cell in cells] == ["none", "batch size 2", "batch size 3"]
    assert [bench.attacked(cell).train.batch_size for cell in cells] == [1, 2, 3]
    assert [bench.trained(cell).train.batch_size for cell in cells] == [1, 2, 3]
    with pytest.raises(SpecError, match="batch_sizes"):
        load_bench({}, [*BENCH, "bench={defenses: [{name: x, levers: [train.batch_sizes=2]}]}"])
