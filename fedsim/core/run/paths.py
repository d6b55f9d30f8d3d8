"""Paths: the name of every file and folder of a run.

spec.yaml run.json run.lock rounds.csv events.jsonl checkpoint.safetensors
observations/ vault/ spool/ reconstructions/ learned/ offline/ positions/ canaries.json
scores.csv scores.parquet envelope.csv membership.csv summary.json
report.html report-redacted.html grid.png
submissions/                            what others made of the published observations, scored
capture.json messages.jsonl             where the federation was somebody else's app

    observations/round-0001/weights.safetensors, .json       what was sent, once for the round
    observations/round-0001/sent-0001.safetensors            what some were sent in their place
    observations/round-0001/client-0003.safetensors, .json   what came back
    vault/round-0001/client-0003.safetensors                 what the client learned from, encrypted
    vault/notices/round-0001/client-0003.json    what clients tell each other, where they compare
    vault/key.id                                 the name of the key that opens the vault
    reconstructions/ATTACK/round-0001/client-0003-trial-0.safetensors, or .failed.json, or while
                                                  it is worked on .unfinished.safetensors
    learned/LEARNER/lesson-0001.json              what an attack learned, lesson by lesson
"""

from __future__ import annotations

from pathlib import Path

from fedsim.core.errors import ObservationError

SPEC, RECORD, LOCK = "spec.yaml", "run.json", "run.lock"
CHECKPOINT, ROUNDS, EVENTS = "checkpoint.safetensors", "rounds.csv", "events.jsonl"
SCORES, SUMMARY, CANARIES = "scores.csv", "summary.json", "canaries.json"
ENVELOPE = "envelope.csv"  # what a suite of attacks came to, picture by picture
REPORT, REDACTED_REPORT, GRID = "report.html", "report-redacted.html", "grid.png"
OBSERVATIONS, VAULT, SPOOL = "observations", "vault", "spool"
RECONSTRUCTIONS, LEARNED = "reconstructions", "learned"
OFFLINE, POSITIONS = "offline", "positions"
SUBMISSIONS = "submissions"
WEIGHTS = "weights.safetensors"
CAPTURE, MESSAGES = "capture.json", "messages.jsonl"  # of an app that was captured
PASSES = "passes"  # in the vault of a witness
VAULT_KEY, VAULT_KEYS = "key.id", "vault-keys"  # the keys of clients elsewhere: beside their vault
RESULT, FAILURE, NOTEBOOK = ".safetensors", ".failed.json", ".unfinished.safetensors"
ROUND_COLUMNS = (
    *("round", "clients", "failed", "train_loss", "test_loss", "test_accuracy"),
    *("bytes", "seconds"),
)


def observation_name(round_: int, client: int) -> str:
    """One client in one round: how the name of each of its files begins."""
    return f"round-{round_:04d}/client-{client:04d}"


def observation_path(root: Path, round_: int, client: int) -> Path:
    """Where an observation keeps its tensors, in a folder of observations."""
    return root / f"{observation_name(round_, client)}.safetensors"


def weights_path(root: Path, round_: int) -> Path:
    """What was sent in a round, in a folder of observations."""
    return root / f"round-{round_:04d}" / WEIGHTS


def sent_path(folder: Path, number: int) -> Path:
    """Tensors that some clients were sent in place of the round's, in the folder of the round."""
    return folder / f"sent-{number:04d}.safetensors"


def truth_path(vault: Path, round_: int, client: int) -> Path:
    """What a client learned from, in a vault."""
    return vault / f"{observation_name(round_, client)}.safetensors"


def state_path(vault: Path, round_: int, client: int) -> Path:
    """What a client keeps for its next round, in a vault."""
    return vault / f"{observation_name(round_, client)}.state.safetensors"


def notice_path(vault: Path, round_: int, client: int) -> Path:
    """What a client tells the others that it will receive, on the board of the clients."""
    return vault / "notices" / f"{observation_name(round_, client)}.json"


def vault_key_path(vault: Path) -> Path:
    """Where a vault says which key opens it."""
    return vault / VAULT_KEY


def list_observations(root: Path) -> list[Path]:
    """Every complete observation in a folder of them, by round and client."""
    return sorted(root.glob("round-*/client-*.json"))


def address_of(path: Path) -> tuple[int, int]:
    """Round and client of an observation file."""
    try:
        return int(path.parent.name.split("-")[1]), int(path.stem.split("-")[1])
    except (IndexError, ValueError):
        raise ObservationError(
            f"'{path}' is no observation; they are named round-0001/client-0000.json."
        ) from None


def result_name(round_: int, client: int, trial: int) -> str:
    """One attack's result on one observation in one trial, in the folder of the attack."""
    return f"{observation_name(round_, client)}-trial-{trial}"


def result_path(results: Path, label: str, round_: int, client: int, trial: int) -> Path:
    """Where an attack's result goes, in a folder of reconstructions."""
    return results / label / f"{result_name(round_, client, trial)}{RESULT}"


def failure_path(result: Path) -> Path:
    """Where the reason is written why there is no such result."""
    return result.with_suffix(FAILURE)


def notebook_path(result: Path) -> Path:
    """Where a long attack keeps its state, to go on from after a crash."""
    return result.with_suffix(NOTEBOOK)


def lesson_path(memory: Path, lesson: int) -> Path:
    """The record of a lesson, in the memory of an attack that learns."""
    return memory / f"lesson-{lesson:04d}.json"


def list_lessons(memory: Path) -> list[Path]:
    """The records of the lessons in a memory, in order."""
    return sorted(memory.glob("lesson-????.json"))
