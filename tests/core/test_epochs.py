"""Epochs: steps and samples, as clients take them and as attackers and accountants count them."""

from __future__ import annotations

import math

import pytest

from fedsim.core.epochs import epoch_rows, samples_of_epoch, steps_of_round


@pytest.mark.parametrize(("count", "size"), [(8, 4), (9, 4), (3, 4), (1, 1)])
def test_an_epoch_uses_every_sample_once_in_order(count: int, size: int) -> None:
    rows = epoch_rows(count, size)
    assert [row for step in rows for row in step] == list(range(count))
    assert len(rows) == math.ceil(count / size)
    assert {len(step) for step in rows[:-1]} <= {size}


def test_a_round_has_the_steps_it_is_told_or_whole_epochs() -> None:
    assert steps_of_round(None, None, 9, 4) == 1
    assert steps_of_round(5, None, 9, 4) == 5
    assert steps_of_round(None, 2, 9, 4) == 6


def test_the_samples_behind_an_update_show_in_its_examples() -> None:
    assert samples_of_epoch(18, 2) == 9
    assert samples_of_epoch(0, 2) == 1
