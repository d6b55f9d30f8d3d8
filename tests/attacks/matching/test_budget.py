"""Budgets: the size of each step."""

from __future__ import annotations

import pytest

from fedsim.attacks.matching.search import Budget


def test_schedules() -> None:
    cosine_, step = Budget(100, lr=1.0, warmup=10), Budget(100, lr=1.0, schedule="step")
    assert cosine_.rate(0) == pytest.approx(0.1)
    assert cosine_.rate(9) == pytest.approx(1.0)
    assert cosine_.rate(55) == pytest.approx(0.5)
    assert [round(step.rate(s), 6) for s in (0, 38, 63, 88)] == [1.0, 0.1, 0.01, 0.001]
    phases = Budget(10, phases=((0.0, 1.0), (0.5, 0.5)))
    assert [phases.matching_weight(d) for d in (0.0, 0.4, 0.5, 0.9)] == [1.0, 1.0, 0.5, 0.5]
