"""Clients that fail, upload nonsense or stay silent: a run that is cut short beside them goes on as
if it had not been."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from flwr.app import Message, MessageType

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.federation.grids import InlineGrid
from tests.conftest import small_spec
from tests.federation.test_strategy import label_seen_by
from tests.planted import TRAIN, VIT, KilledError, assert_same, at_write, killed, resumed

pytestmark = pytest.mark.usefixtures("quick_report")

SPEC = ["data.clients=3", f"train={TRAIN % 2}", "train.clients_per_round=3", VIT]


def with_a_client_that(how: str, root: Path) -> Spec:
    plain = small_spec(*SPEC)
    label = label_seen_by(root / "peek", plain, plain.cohort(1)[0])
    defense = f"{{name: 'tests.faults:OnLabel', label: {label}, how: {how}}}"
    return small_spec(*SPEC, f"defenses=[{defense}]")


def check_cut_short(spec: Spec, root: Path, kind: str) -> None:
    """Killed in the second round, and later with its events lost: always the same scores."""
    control = audit(spec, root / "control")
    events = [event for event in control.events() if event["kind"] == kind]
    assert events
    with at_write(16, killed), pytest.raises(KilledError):
        audit(spec, root / "run")
    assert not (root / "run" / "scores.csv").exists()
    run = resumed(root / "run")
    assert_same(run, control)
    (run.root / "events.jsonl").unlink()
    assert_same(resumed(run.root), control)
    if kind != "update_rejected":  # that client left everything behind, and nothing is done again
        assert [event for event in run.events() if event["kind"] == kind] == events


def test_a_run_with_a_client_that_raises_goes_on(tmp_path: Path) -> None:
    check_cut_short(with_a_client_that("raise", tmp_path), tmp_path, "client_failed")


def test_a_run_with_a_client_that_uploads_nan_goes_on(tmp_path: Path) -> None:
    check_cut_short(with_a_client_that("nan", tmp_path), tmp_path, "update_rejected")


def test_a_run_with_a_client_that_stays_silent_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = InlineGrid.pull_messages

    def without_the_first(grid: InlineGrid, message_ids: Iterable[str]) -> Iterator[Message]:
        for name in list(message_ids):
            about = grid.waiting[name].metadata if name in grid.waiting else None
            silent = about is not None and about.dst_node_id == 1
            if not (silent and about.message_type == MessageType.TRAIN):
                yield from pull(grid, [name])

    monkeypatch.setattr(InlineGrid, "pull_messages", without_the_first)
    check_cut_short(small_spec(*SPEC, "train.timeout=0.2"), tmp_path, "client_silent")


def test_one_who_did_not_answer_left_nothing_that_could_be_damaged(tmp_path: Path) -> None:
    run = audit(with_a_client_that("raise", tmp_path), tmp_path / "run")
    before, told = run.checkpoint.stat().st_mtime_ns, run.events()
    assert "client_failed" in {event["kind"] for event in told}
    resumed(run.root)
    assert Run(run.root).checkpoint.stat().st_mtime_ns == before
    assert run.events() == told
