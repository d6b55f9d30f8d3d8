"""The pace of a round: bounded by the timeout, set by the half that answers, never by a few."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.core.run import Run
from fedsim.federation.pace import FLOOR, GRACE, SIMULATED_FLOOR, UNEVEN, Pace
from tests.conftest import small_spec

HOUR = 3600.0


def test_before_half_has_answered_the_timeout_is_waited_for() -> None:
    pace = Pace(10, FLOOR)
    assert pace.seconds("train", [1, 2, 3], {}, HOUR) == HOUR
    assert pace.seconds("train", [2, 3], {1: 5.0}, HOUR) == HOUR
    assert pace.seconds("train", [1], {}, HOUR) == HOUR


def test_the_rest_gets_a_multiple_of_what_half_took_and_never_less_than_the_floor() -> None:
    pace = Pace(10, FLOOR)
    assert pace.seconds("train", [3], {1: 5.0, 2: 6.0}, HOUR) == FLOOR
    assert pace.seconds("train", [3], {1: 20.0, 2: 30.0}, HOUR) == 300.0
    assert pace.seconds("train", [2], {1: 20.0}, HOUR) == 200.0
    assert pace.seconds("train", [3], {1: 20.0, 2: 30.0}, 100.0) == 100.0, "the timeout is the most"


def test_a_few_slow_clients_do_not_set_the_pace() -> None:
    pace = Pace(10, FLOOR)
    for _ in range(5):  # one of four drags every round out as far as it can
        times = {1: 1.0, 2: 1.0, 3: 1.0}
        times[4] = pace.seconds("train", [4], times, HOUR) - 1
        pace.remember("train", [], times)
    assert pace.seconds("train", [1, 2, 3, 4], {}, HOUR) == FLOOR


def test_what_a_kind_of_answer_took_before_is_known_in_later_rounds() -> None:
    pace = Pace(10, FLOOR)
    pace.remember("train", [], {1: 40.0, 2: 60.0})
    assert pace.seconds("train", [1, 2], {}, HOUR) == 400.0
    assert pace.seconds("evaluate", [1, 2], {}, HOUR) == HOUR, "another kind of question"


def test_who_was_silent_gets_a_short_grace_until_it_answers() -> None:
    pace = Pace(10, FLOOR)
    pace.remember("train", [3], {1: 2.0, 2: 3.0})
    assert pace.seconds("train", [3], {1: 2.0, 2: 2.0}, HOUR) == GRACE
    assert pace.seconds("train", [2, 3], {1: 2.0}, HOUR) == FLOOR, "the others are waited for"
    pace.remember("train", [], {1: 30.0, 2: 30.0, 3: 31.0})
    assert pace.seconds("train", [3], {1: 2.0, 2: 2.0}, HOUR) == 300.0


def test_a_cohort_of_none_but_silent_clients_costs_one_timeout() -> None:
    pace = Pace(10, FLOOR)
    assert pace.seconds("train", [1], {}, HOUR) == HOUR
    pace.remember("train", [1], {})
    assert pace.seconds("train", [1], {}, HOUR) == FLOOR


def test_without_patience_the_timeout_counts() -> None:
    pace = Pace(None, FLOOR)
    pace.remember("train", [3], {1: 1.0, 2: 1.0})
    assert pace.seconds("train", [3], {1: 1.0, 2: 1.0}, HOUR) == HOUR


@pytest.mark.parametrize("deployed", [True, False])
def test_clients_that_are_simulated_are_waited_for_much_longer(
    deployed: bool, tmp_path: Path
) -> None:
    spec = small_spec("train.patience=7")
    pace = Pace.of(spec, Run.create(tmp_path / "run", spec, deployed=deployed))
    assert (pace.patience, pace.floor) == (7, FLOOR if deployed else SIMULATED_FLOOR)


def test_epochs_of_uneven_shards_take_as_much_longer(tmp_path: Path) -> None:
    epochs = "train={local_epochs: 1, upload: delta, patience: 2}"
    uneven = small_spec(epochs, "data.partition={kind: dirichlet, alpha: 0.1}")
    even, spread = (
        Pace.of(spec, Run.create(tmp_path / str(at), spec)).patience
        for at, spec in enumerate((small_spec(epochs), uneven))
    )
    assert even is not None
    assert spread is not None
    assert 2 <= even < 2.5 < spread
    unknown = Run.create(tmp_path / "far", uneven, deployed=True, classes=8)
    assert Pace.of(uneven, unknown).patience == 2 * UNEVEN
