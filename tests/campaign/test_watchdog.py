"""The watchdog: what hangs in its thread is given up, and what does not is not disturbed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedsim.campaign import pulse, watchdog
from fedsim.campaign.pulse import HungError, Limits
from fedsim.campaign.watchdog import EndedError, guarded
from fedsim.core.attack import Progress, no_progress
from fedsim.core.errors import AttackCrashError

LIMITS = Limits(1000.0)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called by work that is about to hang: to whoever watches, an hour passes at once."""
    passed = [0.0]
    monkeypatch.setattr(pulse, "clock", lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(watchdog, "TRY_SECONDS", 0.05)

    def begin() -> None:
        passed[0] += 3600.0

    return begin


def test_work_gives_back_what_it_returns_and_tells_how_far_it_is() -> None:
    told: list[Any] = []

    def work(progress: Progress) -> str:
        progress(1, 2, 0.5)
        return threading.current_thread().name

    result = guarded(work, LIMITS, lambda *step: told.append(step), "a job")
    assert result == "a job"
    assert told == [(1, 2, 0.5)]


class KillError(BaseException):
    pass


def test_an_error_arrives_as_what_it_is_and_so_does_a_kill_of_whoever_watches() -> None:
    def fails(progress: Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(fails, LIMITS, no_progress)

    def killed(done: int, total: int, loss: float | None = None) -> None:
        raise KillError

    with pytest.raises(KillError):
        guarded(lambda progress: progress(1, 2), LIMITS, killed)


def test_a_loop_without_end_is_ended(hang: Callable[[], None]) -> None:
    ended = threading.Event()

    def work(progress: Progress) -> None:
        hang()
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(HungError, match="no sign of life for 1000 s"):
        guarded(work, LIMITS, no_progress)
    assert ended.wait(60)


def test_a_loop_that_catches_every_ordinary_error_is_ended(hang: Callable[[], None]) -> None:
    ended = threading.Event()

    def work(progress: Progress) -> None:
        hang()
        try:
            while True:
                try:
                    time.sleep(0.001)
                except Exception:
                    continue
        finally:
            ended.set()

    with pytest.raises(HungError):
        guarded(work, LIMITS, no_progress)
    assert ended.wait(60)


def test_a_thread_that_waits_elsewhere_is_left_behind_and_ends_when_it_comes_back(
    hang: Callable[[], None],
) -> None:
    door, met = threading.Event(), list[BaseException]()
    back = threading.Event()

    def work(progress: Progress) -> None:
        hang()
        try:
            door.wait()  # nothing gets in here
            progress(1, 2)
        except BaseException as error:
            met.append(error)
            raise
        finally:
            back.set()

    with pytest.raises(HungError):
        guarded(work, LIMITS, no_progress)
    assert not back.is_set()
    door.set()
    assert back.wait(60)
    assert isinstance(met[0], EndedError)


def test_signs_of_life_keep_long_work_alive(hang: Callable[[], None]) -> None:
    def work(progress: Progress) -> int:
        for step in range(5):
            progress(step, 5)
        return 5

    assert guarded(work, LIMITS, no_progress) == 5


def test_ctrl_c_ends_the_work_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def work(progress: Progress) -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr(watchdog, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        guarded(work, LIMITS, no_progress)
    assert ended.wait(60)


def test_work_has_as_many_processor_threads_as_whoever_asked_for_it() -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert guarded(lambda progress: torch.get_num_threads(), LIMITS, no_progress) == count
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, KeyboardInterrupt, KillError])
def test_work_that_would_leave_the_program_has_failed_and_ends_nothing_else(
    kind: type[BaseException],
) -> None:
    def leave(progress: Progress) -> None:
        raise kind(7)

    with pytest.raises(AttackCrashError, match=f"the attack raised {kind.__name__}"):
        guarded(leave, Limits(5, None), no_progress)


def test_a_real_ctrl_c_stops_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, plain = threading.Event(), watchdog.wait

    def work(progress: Progress) -> None:
        begun.set()
        while True:
            time.sleep(0.001)

    def waiting(*args: Any) -> Any:
        begun.wait(60)
        signal.raise_signal(signal.SIGINT)
        return plain(*args)

    monkeypatch.setattr(watchdog, "wait", waiting)
    with pytest.raises(KeyboardInterrupt):
        guarded(work, LIMITS, no_progress)
