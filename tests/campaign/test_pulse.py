"""The pulse of a job: steps are signs of life, silence is none, and nothing goes on for ever."""

from __future__ import annotations

import pytest

from fedsim.campaign import pulse
from fedsim.campaign.pulse import DAY, STEP, Limits, Pulse
from fedsim.core.spec import EngineSpec


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, for tests to set."""
    hand = [0.0]
    monkeypatch.setattr(pulse, "clock", lambda: hand[0])
    return hand


def test_silence_is_measured_from_the_last_sign(now: list[float]) -> None:
    watched = Pulse(Limits(10.0))
    now[0] = 9.0
    assert watched.overdue() is None
    watched.beat(100)
    now[0] = 19.0
    assert watched.overdue() is None
    now[0] = 19.5
    assert watched.overdue() == "it gave no sign of life for 10 s (engine.job_silence)"


def test_a_job_that_never_ends_is_overdue_for_all_its_signs(now: list[float]) -> None:
    watched = Pulse(Limits(10.0, 60.0))
    for second in range(61):
        now[0] = float(second)
        watched.beat(5)
        assert watched.overdue() is None
    now[0] = 61.0
    assert watched.overdue() == "it was not done after 60 s (engine.job_timeout)"


@pytest.mark.parametrize(("steps", "allowed"), [(0, DAY), (10, DAY), (1000, 1000 * STEP)])
def test_without_a_limit_it_is_a_day_or_goes_by_the_steps(
    steps: int, allowed: float, now: list[float]
) -> None:
    watched = Pulse(Limits(1e9))
    watched.beat(steps)
    watched.beat(1)  # a shorter stage takes nothing back
    now[0] = allowed
    assert watched.overdue() is None
    now[0] = allowed + 1
    assert "engine.job_timeout" in str(watched.overdue())


def test_the_limits_are_the_specs() -> None:
    engine = EngineSpec(job_silence=5, job_timeout=50)
    assert Limits.of(engine) == Limits(5.0, 50.0)
    assert Limits.of(EngineSpec()) == Limits(3600.0, None)
