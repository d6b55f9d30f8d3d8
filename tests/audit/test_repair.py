"""Faults, planted one at a time: after each, `fedsim audit --resume` ends with the scores of a run
that met none, or says in one sentence what cannot be repaired."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.stages import audit, federate
from fedsim.campaign.jobs import Job
from fedsim.campaign.progress import Silent
from fedsim.core import files
from fedsim.core.errors import RunError
from fedsim.core.files import UNFINISHED, save_tensors
from fedsim.core.observation import read_weights
from fedsim.core.run import Run, list_observations, weights_path
from fedsim.core.spec import Spec
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.scoring.scores import columns
from tests.conftest import SMALL, small_spec
from tests.staging import short_report

VIT = "model.options={patch_size: 8, depth: 1, embed_dim: 48, num_heads: 2}"
TRAIN = "{rounds: %d, clients_per_round: 2, lr: 0.05, evaluate: false}"
TINY = ["data.clients=2", f"train={TRAIN % 1}", VIT]
# A client that keeps a state of its own, an attack that fails: every kind of file there is.
RICH = [
    "data.clients=2",
    f"train={TRAIN % 2}",
    VIT,
    "defenses=[{name: top_k, sparsity: 0.5, feedback: true}]",
    "attacks=[{name: patch_solve}, {name: 'tests.faults:Declines'}]",
]


def tiny_spec() -> Spec:
    return small_spec(*TINY)


def numbers(run: Run) -> pd.DataFrame:
    return run.scores[[column for column in columns() if column != "seconds"]]


def resumed(root: Path) -> Run:
    run = Run.open(root)
    return audit(run.spec, root)


def assert_same(run: Run, control: Run) -> None:
    pd.testing.assert_frame_equal(numbers(run), numbers(control))
    assert not list(run.root.rglob(f"*{UNFINISHED}"))


@pytest.fixture(autouse=True)
def _quick_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is one more file, and most of the time; its own tests read it."""
    if "whole_report" not in request.fixturenames:
        monkeypatch.setattr("fedsim.report.write_report", short_report)


@pytest.fixture
def whole_report() -> None:
    """For a test that wants the page as well."""


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(tiny_spec(), tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture(scope="module")
def rich_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audit(small_spec(*RICH), tmp_path_factory.mktemp("rich") / "run")


class KilledError(BaseException):
    """As a kill is: nothing catches it, nothing is tidied up after it."""


@contextmanager
def at_write(
    number: int, fault: Callable[[Path], None], *, after: bool = False
) -> Iterator[list[str]]:
    """Let ``fault`` happen at the so-manieth file written; yields the names of those written."""
    written: list[str] = []
    replacing = files._replacing

    @contextmanager
    def faulty(path: Path, mode: int) -> Iterator[Path]:
        written.append(path.name)
        if len(written) == number and not after:
            fault(path)
        with replacing(path, mode) as temporary:
            yield temporary
        if len(written) == number and after:
            fault(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_replacing", faulty)
        yield written


def killed(path: Path) -> None:
    raise KilledError(path.name)


def killed_while_writing(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / f".{path.name}.k3x{UNFINISHED}").write_bytes(b"half of")
    raise KilledError(path.name)


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


# -- kills and full disks at every write --------------------------------------------------------


def survives(fault: Callable[[Path], None], control: Run, root: Path, step: int = 1) -> int:
    """The fault at every ``step``-th write of a run, each followed by a resumption."""
    faults = 0
    for number in itertools.count(1, step):
        run = root / str(number)
        try:
            with at_write(number, fault) as written:
                audit(tiny_spec(), run)
        except (KilledError, OSError, RunError):
            faults += 1
        if len(written) < number:
            return faults
        assert_same(audit(tiny_spec(), run), control)
        shutil.rmtree(run)
    raise AssertionError


def test_a_run_killed_between_any_two_writes_goes_on(tiny_run: Run, tmp_path: Path) -> None:
    files = survives(killed, tiny_run, tmp_path)
    assert files >= 20


def test_a_run_killed_while_it_writes_leaves_nothing_behind(tiny_run: Run, tmp_path: Path) -> None:
    assert survives(killed_while_writing, tiny_run, tmp_path, step=3) >= 7


def test_a_disk_full_at_any_write_loses_nothing_that_was_done(
    tiny_run: Run, tmp_path: Path
) -> None:
    assert survives(full, tiny_run, tmp_path, step=2) >= 8


def test_a_full_vault_stops_the_run_and_fails_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, tensors: object, metadata: object = None, mode: int = 0o644) -> None:
        full(path)

    monkeypatch.setattr("fedsim.core.vault.save_tensors", save)
    with pytest.raises(RunError, match=r"vault cannot be written: No space left on device\.$"):
        audit(tiny_spec(), tmp_path / "run")
    assert Run(tmp_path / "run").events() == []
    assert not Run(tmp_path / "run").checkpoint.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes a root who may")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full_is_an_error_and_more_room_goes_on(
    small_disk: Path, tiny_run: Run
) -> None:
    with pytest.raises((OSError, RunError), match="No space left"):
        audit(tiny_spec(), small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert_same(resumed(small_disk / "run"), tiny_run)


def test_a_read_only_directory_is_one_sentence(small_disk: Path, tiny_run: Run) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    run = shutil.copytree(tiny_run.root, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for root in (run, small_disk / "new"):
        with pytest.raises(RunError, match="cannot be written: Read-only file system"):
            audit(tiny_spec(), root)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert_same(resumed(run), tiny_run)


# -- signals and other processes ----------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from fedsim.audit.stages import audit
from fedsim.core import files
from tests.conftest import small_spec

replacing = files._replacing
def fatal(path, mode):
    if path.name == sys.argv[2]:
        (path.parent / f".{path.name}.k3x{files.UNFINISHED}").write_bytes(b"half of")
        if sys.argv[3] == "SLEEP":
            print("here", flush=True)
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    return replacing(path, mode)
files._replacing = fatal
audit(small_spec(*sys.argv[4:]), Path(sys.argv[1]))
"""


def process(root: Path, file: str, signal_: str) -> subprocess.Popen[str]:
    """A run in a process of its own, that meets ``signal_`` when it writes ``file``."""
    words = [sys.executable, "-c", PROGRAM, str(root), file, signal_, *TINY]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("signal_", ["SIGTERM", "SIGINT"])
def test_a_process_that_meets_a_signal_while_writing_is_gone_on_from(
    signal_: str, tiny_run: Run, tmp_path: Path
) -> None:
    with process(tmp_path / "run", "checkpoint.safetensors", signal_) as driver:
        assert driver.wait(120) != 0
    assert not (tmp_path / "run" / "scores.csv").exists()
    assert_same(resumed(tmp_path / "run"), tiny_run)


def test_a_second_process_is_told_of_the_first_and_takes_over_when_that_is_dead(
    tiny_run: Run, tmp_path: Path
) -> None:
    with process(tmp_path / "run", "checkpoint.safetensors", "SLEEP") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "here\n"
        with pytest.raises(RunError, match=rf"another process \({first.pid}\) is at work in"):
            audit(tiny_spec(), tmp_path / "run")
        first.send_signal(signal.SIGKILL)
    assert (tmp_path / "run" / "run.lock").read_text() == f"{first.pid}\n"
    assert_same(resumed(tmp_path / "run"), tiny_run)


# -- damaged files ------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], object]] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deleted": lambda path: path.unlink(),
    "altered": lambda path: path.write_bytes(_altered(path.read_bytes())),
    "emptied": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 8),
}
OFTEN, SELDOM = ["half", "deleted", "altered"], ["emptied", "garbage"]

FILES = [
    "checkpoint.safetensors",
    "canaries.json",
    "events.jsonl",
    "rounds.csv",
    "run.json",
    "scores.csv",
    "scores.parquet",
    "summary.json",
    "report.html",
    "observations/round-0001/weights.safetensors",
    "observations/round-0002/weights.json",
    "observations/round-0001/client-0000.json",
    "observations/round-0002/client-0001.safetensors",
    "vault/round-0001/client-0001.safetensors",
    "vault/round-0002/client-0000.safetensors",
    "vault/round-0001/client-0000.state.safetensors",
    "vault/round-0002/client-0000.state.safetensors",
    "reconstructions/patch_solve/round-0001/client-0000-trial-0.safetensors",
    "reconstructions/prior_only/round-0002/client-0001-trial-0.safetensors",
    "reconstructions/Declines/round-0001/client-0000-trial-0.failed.json",
]


def _altered(content: bytes) -> bytes:
    """One bit of it, near the end, where the numbers are."""
    at = len(content) - 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_the_list_of_files_is_that_of_a_run(rich_run: Run) -> None:
    rich_run.note("test", "an event")
    there = {path.relative_to(rich_run.root).as_posix() for path in rich_run.root.rglob("*.*")}
    assert set(FILES) <= there
    known = {Path(name).suffixes[-1] + Path(name).parts[0] for name in FILES}
    others = {name for name in there if Path(name).suffixes[-1] + Path(name).parts[0] not in known}
    assert others == {"run.lock", "spec.yaml", "grid.png"}


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_made_again_with_the_same_scores(
    file: str, rich_run: Run, tmp_path: Path
) -> None:
    check_damage(file, OFTEN, rich_run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_an_empty_file_or_one_of_nonsense_is_made_again(
    file: str, rich_run: Run, tmp_path: Path
) -> None:
    check_damage(file, SELDOM, rich_run, tmp_path)


def check_damage(file: str, kinds: list[str], control: Run, root: Path) -> None:
    run = Run(shutil.copytree(control.root, root / "run"))
    for kind in kinds:
        path = run.root / file
        run.note("test", "an event, so that there is a file of them")
        whole = path.read_bytes()
        DAMAGE[kind](path)
        assert_same(resumed(run.root), control)
        if path.suffix == ".safetensors" and path.parts[-4] != "reconstructions":
            tensors, _ = files.read_tensors(path)
            path.write_bytes(whole)
            assert files.checksum(tensors) == files.checksum(files.read_tensors(path)[0])
        assert len(run.summary["failed_jobs"]) == len(control.summary["failed_jobs"])


def test_what_was_mended_is_told(rich_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    DAMAGE["half"](run.observations / "round-0002" / "client-0001.safetensors")
    DAMAGE["half"](run.reconstructions / "patch_solve/round-0001/client-0000-trial-0.safetensors")
    kept = run.reconstructions / "patch_solve/round-0002/client-0001-trial-0.safetensors"
    before = kept.stat().st_mtime_ns
    resumed(run.root)
    rounds, result = (e["message"] for e in run.summary["events"] if e["kind"] == "mended")
    assert rounds.startswith("the rounds from 2 on are done again: the observation '")
    assert result.endswith("the result was damaged and is made again")
    assert kept.stat().st_mtime_ns == before  # the round was done alike: its result still stands


MISPLACED = {
    "truths of two clients": ("vault", "round-0001/client-000{}.safetensors"),
    "truths of two rounds": ("vault", "round-000{}/client-0000.safetensors"),
    "states of two clients": ("vault", "round-0001/client-000{}.state.safetensors"),
    "what came back from two clients": ("observations", "round-0001/client-000{}.*"),
}


@pytest.mark.parametrize("what", MISPLACED)
def test_files_that_changed_places_are_made_again_with_the_same_scores(
    what: str, rich_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    folder, pattern = MISPLACED[what]
    numbers_ = (1, 2) if "rounds" in what else (0, 1)
    pairs = [sorted((run.root / folder).glob(pattern.format(number))) for number in numbers_]
    for one, other in zip(*pairs, strict=True):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
    assert_same(resumed(run.root), rich_run)
    (told,) = [event["message"] for event in run.events() if event["kind"] == "mended"]
    assert told.startswith("the rounds from 1 on are done again: the vault's")


def test_a_result_of_another_observation_is_made_again(tiny_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    first = run.reconstructions / "patch_solve/round-0001/client-0000-trial-0.safetensors"
    second = run.reconstructions / "patch_solve/round-0001/client-0001-trial-0.safetensors"
    shutil.copy(first, second)
    assert_same(resumed(run.root), tiny_run)
    assert "the observation is another now" in run.events()[0]["message"]


@pytest.mark.parametrize("kind", ["half", "emptied", "garbage", "altered"])
def test_a_damaged_notebook_starts_the_attack_afresh(kind: str, tmp_path: Path) -> None:
    attack = "attacks=[{name: inverting_gradients, steps: 6, checkpoint_seconds: 0.0}]"
    spec = small_spec(*TINY, attack, "audit.victims=1")
    control = audit(spec, tmp_path / "control")

    class StopsHalfway(Silent):
        def progressed(self, job: Job, done: int, total: int, loss: float | None) -> None:
            if done == 4:
                raise KilledError

    with pytest.raises(KilledError):
        audit(spec, tmp_path / "run", watch=StopsHalfway())
    pages = list((tmp_path / "run").rglob("*.unfinished*"))
    assert pages
    for page in pages:
        DAMAGE[kind](page)
    assert_same(resumed(tmp_path / "run"), control)


def test_a_damaged_spec_is_one_sentence_and_the_spec_itself_mends_it(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    for kind in ("half", "deleted", "emptied", "garbage"):
        DAMAGE[kind](run.spec_path)
        with pytest.raises(RunError, match=r"spec.yaml' is missing, damaged .* give that again"):
            Run.open(run.root)
        with pytest.raises(RunError, match="a run of another spec"):
            audit(small_spec(*TINY, "seed=5"), run.root)
        assert_same(audit(tiny_spec(), run.root), tiny_run)
        assert Run.open(run.root).spec == tiny_spec()


def test_a_damaged_truth_costs_its_victim_when_only_the_report_is_asked_for(
    rich_run: Run, tmp_path: Path, whole_report: None
) -> None:
    from fedsim.audit.stages import conclude

    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    DAMAGE["half"](run.vault / "round-0001" / "client-0001.safetensors")
    DAMAGE["half"](run.reconstructions / "patch_solve/round-0002/client-0000-trial-0.safetensors")
    conclude(run)
    lost = rich_run.scores.query("(round == 1 and client == 1) or (round == 2 and client == 0)")
    lost = lost[(lost["round"] == 1) | (lost["attack"] == "patch_solve")]
    assert len(run.scores) == len(rich_run.scores) - len(lost) == 5
    told = [event["message"] for event in run.events() if event["kind"] == "not_scored"]
    assert len(told) == len(lost) == 3
    assert all("go on with `fedsim audit --resume`" in message for message in told)
    assert "is not scored: the vault" in run.report.read_text()


def test_weights_of_an_earlier_round_serve_where_those_of_the_round_are_lost(
    tmp_path: Path,
) -> None:
    spec = small_spec(*TINY, "train.rounds=3")
    control = audit(spec, tmp_path / "control")
    run = Run(shutil.copytree(control.root, tmp_path / "run"))
    weights_path(run.observations, 3).unlink()
    weights_path(run.observations, 2).write_bytes(b"")
    resumed(run.root)
    assert "the rounds from 1 on" in run.events()[0]["message"]
    assert_same(run, control)
    weights_path(run.observations, 3).unlink()  # those of round 2 are there again
    resumed(run.root)
    assert "the rounds from 2 on" in run.events()[-1]["message"]
    assert_same(run, control)


# -- clocks, strategies, clients ----------------------------------------------------------------


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_clocks_that_jump_change_no_score(
    jump: float, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("time", "perf_counter"):
        clock, calls = getattr(time, name), itertools.count()
        monkeypatch.setattr(time, name, lambda clock=clock, n=calls: clock() + jump * next(n))
    with at_write(12, killed), pytest.raises(KilledError):
        audit(tiny_spec(), tmp_path / "run")
    assert_same(resumed(tmp_path / "run"), tiny_run)


class StopAfterOne(Silent):
    def round_done(self, row: dict) -> None:
        raise KilledError


@pytest.mark.parametrize("strategy", ["FedAdam", "FedYogi", "FedAdagrad", "FedAvgM"])
def test_a_strategy_with_a_memory_goes_on_where_it_was(strategy: str, tmp_path: Path) -> None:
    options = "{server_momentum: 0.9}" if strategy == "FedAvgM" else "{eta: 0.01}"
    spec = small_spec(
        *TINY, "train.rounds=3", f"train.strategy={strategy}", f"train.strategy_options={options}"
    )
    whole = federate(spec, tmp_path / "whole")
    with pytest.raises(KilledError):
        federate(spec, tmp_path / "cut", watch=StopAfterOne())
    cut = Run(tmp_path / "cut")
    assert len(read_checkpoint(cut).rows) == 1
    assert read_checkpoint(cut).state
    federate(spec, cut.root)
    one, two = (read_checkpoint(run) for run in (whole, cut))
    assert all((one.arrays[name] == two.arrays[name]).all() for name in one.arrays)
    assert one.state.keys() == two.state.keys()
    DAMAGE["half"](cut.observations / "round-0002" / "client-0001.safetensors")
    federate(spec, cut.root)
    again = read_checkpoint(cut)
    assert all((one.arrays[name] == again.arrays[name]).all() for name in one.arrays)
    assert "from 1 on" in cut.events()[0]["message"]


def test_a_checkpoint_that_never_counted_its_rounds_is_damaged(tiny_run: Run, tmp_path) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    weights = read_weights(weights_path(run.observations, 1))
    for rows in ('[{"round": 7}]', '{"round": 1}', "none"):
        save_tensors(run.checkpoint, weights, {"rounds": rows})
        with pytest.raises(RunError, match="is damaged"):
            read_checkpoint(run)
        assert_same(resumed(run.root), tiny_run)


@pytest.mark.slow
def test_a_killed_client_and_a_killed_worker_change_no_score(tmp_path: Path) -> None:
    attacks = [
        {"name": "tests.faults:KillsItsWorker", "marker": str(tmp_path / "worker")},
        {"name": "patch_solve"},
    ]
    defense = {"name": "tests.faults:KillsItsClient", "marker": str(tmp_path / "client")}
    words = [f"attacks={json.dumps(attacks)}", f"defenses={json.dumps([defense])}"]
    spec = small_spec(*SMALL, *words, "engine={kind: ray, device: cpu}")
    run = audit(spec, tmp_path / "run")
    assert (tmp_path / "worker").exists()
    assert [event["kind"] for event in run.events()] == ["client_revived"]
    control = audit(small_spec(*SMALL, *words), tmp_path / "control")
    assert len(list_observations(run.observations)) == 4
    assert_same(run, control)
