"""Damaged files: found, told, and made again with the scores of a run that was not damaged; or one
sentence where nobody could make them again."""

from __future__ import annotations

import contextlib
import random
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
from torch import Tensor

from fedsim.audit.stages import attack_captured, audit, conclude
from fedsim.campaign.jobs import Job
from fedsim.campaign.progress import Silent
from fedsim.core import files
from fedsim.core.errors import FedsimError, MissingKeyError, RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.keyring import VARIABLE, key_folders
from fedsim.core.run import Run, list_observations
from fedsim.core.run.record import Record, write_record
from fedsim.core.spec import load_spec
from fedsim.core.vault import Vault
from fedsim.report import write_report
from tests.conftest import small_spec
from tests.planted import (
    DAMAGE,
    TINY,
    KilledError,
    assert_same,
    flip,
    resumed,
    tiny_spec,
)

pytestmark = pytest.mark.usefixtures("quick_report")

FILES = [
    "checkpoint.safetensors",
    "canaries.json",
    "events.jsonl",
    "rounds.csv",
    "run.json",
    "spec.yaml",
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
    "vault/key.id",
    "reconstructions/patch_solve/round-0001/client-0000-trial-0.safetensors",
    "reconstructions/prior_only/round-0002/client-0001-trial-0.safetensors",
    "reconstructions/Declines/round-0001/client-0000-trial-0.failed.json",
]


SLOW = pytest.mark.slow
THIRD = [
    file if number % 3 == 0 else pytest.param(file, marks=SLOW) for number, file in enumerate(FILES)
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["half", pytest.param("deleted", marks=SLOW)])
def test_a_damaged_file_is_made_again_with_the_same_scores(
    kind: str, file: str, rich_run: Run, tmp_path: Path
) -> None:
    check_damage(file, kind, rich_run, tmp_path)


@pytest.mark.parametrize("file", THIRD)
@pytest.mark.parametrize("kind", ["pipe", pytest.param("endless", marks=SLOW)])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(
    kind: str, file: str, rich_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    run.note("test", "an event, so that there is a file of them")
    DAMAGE[kind](run.root / file)
    with contextlib.suppress(FedsimError):  # the report alone: of what can be read, or a sentence
        conclude(Run.open(run.root))
    assert_same(resumed(run.root), rich_run)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["emptied", "garbage"])
def test_an_empty_file_or_one_of_nonsense_is_made_again(
    kind: str, file: str, rich_run: Run, tmp_path: Path
) -> None:
    check_damage(file, kind, rich_run, tmp_path)


def check_damage(file: str, kind: str, control: Run, root: Path) -> None:
    run = Run(shutil.copytree(control.root, root / "run"))
    path = run.root / file
    run.note("test", "an event, so that there is a file of them")
    whole = path.read_bytes()
    DAMAGE[kind](path)
    assert_same(resumed(run.root), control)
    if path.suffix == ".safetensors" and path.parts[-4] != "reconstructions":
        again = tensors_of(run, path)
        path.write_bytes(whole)
        assert files.checksum(again) == files.checksum(tensors_of(run, path))
    assert len(run.summary["failed_jobs"]) == len(control.summary["failed_jobs"])


def tensors_of(run: Run, path: Path) -> dict[str, Tensor]:
    """What a file holds, opened where it is the vault's."""
    if path.is_relative_to(run.vault):
        return files.tensors_from_bytes(Vault(run.vault)._content(path), path)[0]
    return files.read_tensors(path)[0]


# -- a bit of any file --------------------------------------------------------------------------

# Every kind of file that a run may hold. A file that no line here knows fails a test: whoever adds
# a kind says what becomes of it when a bit of it turns.
TOLD = [
    *("run.json", "spec.yaml", "checkpoint.safetensors", "canaries.json", "summary.json"),
    "events.jsonl",
    "observations/round-????/weights.json",
    "observations/round-????/weights.safetensors",
    "observations/round-????/client-????.json",
    "observations/round-????/client-????.safetensors",
    "vault/round-????/client-????.safetensors",
    "vault/round-????/client-????.state.safetensors",
    "vault/key.id",
    "reconstructions/*/round-????/client-????-trial-?.safetensors",
    "reconstructions/*/round-????/client-????-trial-?.failed.json",
    "learned/*/lesson-????.json",
    "learned/*/state.safetensors",
    "learned/*/step-?????.safetensors",
    "learned/*/samples.png",
]
ANEW = ["rounds.csv", "scores.csv", "scores.parquet", "report.html", "grid.png", "run.lock"]


def kinds_in(run: Run) -> dict[str, list[str]]:
    """The files of a run, by the pattern that knows them."""
    found: dict[str, list[str]] = {}
    for path in sorted(run.root.rglob("*")):
        if path.is_file():
            name = path.relative_to(run.root).as_posix()
            pattern = next((p for p in [*TOLD, *ANEW] if fnmatch(name, p)), None)
            assert pattern is not None, f"what becomes of '{name}' when a bit of it turns?"
            found.setdefault(pattern, []).append(name)
    return found


@pytest.fixture(scope="module")
def noted_run(rich_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The rich run with events in it."""
    run = Run(shutil.copytree(rich_run.root, tmp_path_factory.mktemp("noted") / "run"))
    for number in range(3):
        run.note("test", f"an event, the {number}th")
    return run


@pytest.fixture(scope="module")
def learned_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with an attack that learns."""
    giml = (
        "{name: giml, options: {latent_size: 4, width: 4}, task_steps: 2, shared_steps: 1, "
        "tasks: 2, meta_steps: 1, snapshot: 1, steps: 2, seeds: 1}"
    )
    spec = load_spec(
        {},
        [
            "data={image_size: 16, clients: 2}",
            "model={name: convnet, options: {channels: [4, 6]}}",
            "train={rounds: 1, clients_per_round: 2, evaluate: false}",
            f"attacks=[{giml}]",
            "engine={kind: inline, device: cpu}",
        ],
    )
    return audit(spec, tmp_path_factory.mktemp("learned") / "run")


def test_every_kind_of_file_is_known_and_every_known_kind_is_met(
    noted_run: Run, learned_run: Run
) -> None:
    assert {*kinds_in(noted_run), *kinds_in(learned_run)} == {*TOLD, *ANEW}


def check_flip(control: Run, name: str, at: int, bit: int, root: Path) -> None:
    """One bit of one file: it is told which, and the scores are as they were."""
    run = Run(shutil.copytree(control.root, root / "run"))
    path = run.root / name
    flip(path, at, bit)
    damaged = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        if name == "grid.png":  # the whole report alone draws it
            patch.setattr("fedsim.report.write_report", write_report)
        assert_same(resumed(run.root), control)
    if any(fnmatch(name, pattern) for pattern in ANEW):
        assert path.read_bytes() != damaged
    else:
        told = [event["message"] for event in run.summary["events"]]
        assert any(name in message for message in told), f"{name}, byte {at}, bit {bit}: {told}"
    shutil.rmtree(run.root)


def places(run: Run, name: str, count: int) -> list[tuple[int, int]]:
    """Bytes and bits of a file, the first and the last byte among them where there are several."""
    size, coin = (run.root / name).stat().st_size, random.Random(name)
    chosen = [0, size - 1, *(coin.randrange(size) for _ in range(max(1, count - 2)))]
    return [(at, coin.randrange(8)) for at in chosen[-count:]]


@pytest.mark.parametrize("pattern", [*TOLD, *ANEW])
def test_a_bit_that_turned_is_told_with_the_name_of_its_file_and_changes_no_score(
    pattern: str, noted_run: Run, learned_run: Run, tmp_path: Path
) -> None:
    control = learned_run if pattern.startswith("learned") else noted_run
    name = kinds_in(control)[pattern][-1]
    ((at, bit),) = places(control, name, 1)
    check_flip(control, name, at, bit, tmp_path)


@pytest.mark.slow
def test_a_bit_that_turned_is_told_in_every_file_of_a_run(
    noted_run: Run, learned_run: Run, tmp_path: Path
) -> None:
    flipped = 0
    for control in (noted_run, learned_run):
        for names in kinds_in(control).values():
            for name in names:
                for at, bit in places(control, name, 4):
                    check_flip(control, name, at, bit, tmp_path)
                    flipped += 1
    assert flipped > 150


def test_scores_and_a_summary_that_somebody_edited_are_worked_out_again(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    scores = run.root / "scores.csv"
    scores.write_text(scores.read_text().replace("patch_solve", "nothing_at_all"))
    summary = read_json(run.summary_path)
    summary["verdicts"][0]["verdict"] = "NOT RECOVERED"
    write_json(run.summary_path, summary)
    assert_same(resumed(run.root), tiny_run)
    assert run.summary["verdicts"][0]["verdict"] == tiny_run.summary["verdicts"][0]["verdict"]


# -- spec and record ----------------------------------------------------------------------------


def test_a_damaged_spec_is_written_again_from_the_record_and_told(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    whole = run.spec_path.read_bytes()
    for kind in DAMAGE:
        DAMAGE[kind](run.spec_path)
        with pytest.raises(RunError, match="a run of another spec"):
            audit(small_spec(*TINY, "seed=5"), run.root)
        assert_same(resumed(run.root), tiny_run)
        assert run.spec_path.read_bytes() == whole
    assert {event["file"] for event in run.events()} == {"spec.yaml"}


def test_an_engine_that_turned_in_the_spec_is_the_one_of_the_beginning(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    text = run.spec_path.read_text()
    assert "retries: 1" in text
    run.spec_path.write_text(text.replace("retries: 1", "retries: 9"))
    assert Run.open(run.root).spec.engine.retries == 1


def test_spec_and_record_both_lost_are_one_sentence_that_says_what_to_do(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    DAMAGE["altered"](run.spec_path)
    DAMAGE["altered"](run.root / "run.json")
    for use in (Run.open, lambda root: audit(tiny_spec(), root), attack_captured):
        with pytest.raises(RunError, match=r"put it back from a copy, or write into it"):
            use(run.root)
    (run.root / "run.json").write_text('{"deployed": false}')
    with pytest.raises(RunError, match=r"give that again: fedsim audit SPEC -o"):
        Run.open(run.root)
    assert_same(audit(tiny_spec(), run.root), tiny_run)
    assert Run.open(run.root).spec == tiny_spec()


# -- clients elsewhere --------------------------------------------------------------------------


def elsewhere(run: Run, root: Path) -> Run:
    """A copy of a run as if its clients had not been simulated."""
    shutil.copytree(run.root, root)
    write_record(root, Record.of(run.spec, deployed=True, classes=None))
    return Run(root)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", ["run.json", "spec.yaml"])
def test_a_damaged_record_simulates_nobody_elsewhere(
    file: str, kind: str, rich_run: Run, tmp_path: Path
) -> None:
    run = elsewhere(rich_run, tmp_path / "run")
    DAMAGE[kind](run.root / file)
    assert Run(run.root).deployed
    DAMAGE["half"](run.observations / "round-0001" / "client-0000.safetensors")
    damaged = {path: path.read_bytes() for path in run.observations.rglob("*.*")}
    resumed(run.root)  # a simulation would have made the observation again
    assert {path: path.read_bytes() for path in run.observations.rglob("*.*")} == damaged
    assert Run(run.root).deployed
    run.checkpoint.unlink()
    DAMAGE[kind](run.root / file)
    with pytest.raises(RunError, match="clients elsewhere and some of its rounds are missing"):
        resumed(run.root)


def test_a_record_from_before_that_is_damaged_is_asked_for(rich_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    about = {k: v for k, v in read_json(run.root / "run.json").items() if k != "spec"}
    files.write_atomically(run.spec_path, rich_run.spec.to_yaml().encode())  # as it was kept then
    for damage in ("half", "deleted"):
        write_json(run.root / "run.json", about)
        assert_same(resumed(run.root), rich_run)
        DAMAGE[damage](run.root / "run.json")
        with pytest.raises(RunError, match="put it back from a copy, or write into it"):
            Run.open(run.root)
        with pytest.raises(RunError, match="put it back from a copy, or write into it"):
            assert Run(run.root).deployed
        (run.root / "run.json").write_text('{"deployed": true}')
        assert Run.open(run.root).deployed


def test_clients_elsewhere_lose_no_round_with_a_damaged_checkpoint(
    rich_run: Run, tmp_path: Path
) -> None:
    run = elsewhere(rich_run, tmp_path / "run")
    DAMAGE["altered"](run.checkpoint)
    assert_same(resumed(run.root), rich_run)
    (told,) = run.events()
    assert told["message"].startswith("'checkpoint.safetensors' was damaged; the model after")
    DAMAGE["altered"](run.checkpoint)
    DAMAGE["half"](run.root / "rounds.csv")
    with pytest.raises(RunError, match="some of its rounds are missing"):
        resumed(run.root)


# -- what an attack keeps -----------------------------------------------------------------------


def test_a_result_of_another_observation_is_made_again(tiny_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(tiny_run.root, tmp_path / "run"))
    first = run.reconstructions / "patch_solve/round-0001/client-0000-trial-0.safetensors"
    second = run.reconstructions / "patch_solve/round-0001/client-0001-trial-0.safetensors"
    shutil.copy(first, second)
    assert_same(resumed(run.root), tiny_run)
    assert "made from another update than the one observed" in run.events()[0]["message"]


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


def test_damage_that_only_the_report_meets_is_left_out_and_told(
    learned_run: Run, tmp_path: Path
) -> None:
    from fedsim.report.learned import learned

    run = Run(shutil.copytree(learned_run.root, tmp_path / "run"))
    (memory,) = run.learned.iterdir()
    assert len(learned(run)) == 1
    DAMAGE["half"](memory / "samples.png")
    assert learned(run) == []
    DAMAGE["altered"](memory / "lesson-0001.json")
    conclude(run)
    told = [event["message"] for event in run.events() if event["kind"] == "damaged"]
    assert len(told) == 2
    assert "is not shown" in told[0]
    assert "lesson-0001.json' is damaged" in told[1]


# -- clients ------------------------------------------------------------------------------------


def test_a_vault_that_is_gone_is_filled_again(rich_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    shutil.rmtree(run.vault)
    assert_same(resumed(run.root), rich_run)
    assert run.vault.stat().st_mode & 0o777 == 0o700
    assert len(list_observations(run.observations)) == len(list_observations(rich_run.observations))


# -- whose files they are -----------------------------------------------------------------------

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
    told = [event["message"] for event in run.events() if event["kind"] == "mended"]
    assert told[0].startswith("the rounds from 1 on are done again: the vault's")


def test_a_vault_whose_key_is_elsewhere_is_left_alone_and_its_owner_told(
    rich_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    name = f"{Vault(run.vault).keys.own().name}.key"
    kept = next(folder / name for folder in key_folders() if (folder / name).is_file())
    before = {file: file.read_bytes() for file in run.vault.rglob("*") if file.is_file()}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "keys"))
    lost = (
        rf"bring '{name}' .*; where it is lost, delete the vault and the rounds are done again\.$"
    )
    with pytest.raises(MissingKeyError, match=lost):
        resumed(run.root)
    with pytest.raises(MissingKeyError, match=f"bring '{name}'"):
        conclude(run)
    assert {file: file.read_bytes() for file in run.vault.rglob("*") if file.is_file()} == before
    (tmp_path / "keys").mkdir()
    shutil.copy(kept, tmp_path / "keys")
    assert_same(resumed(run.root), rich_run)
    shutil.rmtree(tmp_path / "keys")
    shutil.rmtree(run.vault)
    assert_same(resumed(run.root), rich_run)
    assert [file.suffix for file in (tmp_path / "keys").iterdir()] == [".key"]


def test_a_run_whose_vault_is_not_encrypted_goes_on(rich_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(rich_run.root, tmp_path / "run"))
    vault = Vault(run.vault)
    for file in run.vault.rglob("*.safetensors"):
        file.write_bytes(vault._content(file))
    (run.vault / "key.id").unlink()
    (run.root / "scores.csv").unlink()
    assert_same(resumed(run.root), rich_run)
    assert not (run.vault / "key.id").exists()
    (run.vault / "round-0002" / "client-0001.safetensors").unlink()
    assert_same(resumed(run.root), rich_run)
    assert (run.vault / "key.id").is_file()
