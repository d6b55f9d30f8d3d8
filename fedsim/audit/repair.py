"""Repair: what a kill or a bad disk did to a run, found and set right before the run goes on.

Whatever can be computed again is thrown away and done again. A round whose observation, truth or
client state is damaged, or lies in another one's place, is redone from the weights that were sent
in it: simulated clients draw everything from the spec's seed, so they do the same again. Where an
observation is of another run, so may be the weights beside it, and all rounds are redone. Clients
elsewhere do not: of theirs nothing is thrown away that only they could make. A result names by
hash the observation and the job it was made from, and is thrown away where it lies under others.
Only a vault
whose key is elsewhere is left for its owner to decide about.
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from fedsim.attacks import code_of, create_attack
from fedsim.campaign.jobs import Job, refuse_other_result
from fedsim.campaign.plan import observed_rounds
from fedsim.core.attack import Reconstruction, traits_of
from fedsim.core.errors import (
    DamagedError,
    FedsimError,
    ForeignCheckpointError,
    ForeignObservationError,
    MisplacedObservationError,
    MissingKeyError,
    RunError,
    VaultError,
)
from fedsim.core.files import UNFINISHED, read_json, read_tensors
from fedsim.core.observation import (
    check_observation,
    read_weights,
    recorded_checksum,
    refuse_foreign,
    remembered,
)
from fedsim.core.reading import read_file
from fedsim.core.run import Run, observation_name, vault_key_path, weights_path
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from fedsim.federation.checkpoint import Checkpoint, read_checkpoint, write_checkpoint, write_rounds

ABSENT = (
    "client_failed",
    "client_silent",
    "client_refused",
)  # events of clients that left nothing in a round
_LAST_PART = b"\0\0\0\0IEND\xaeB`\x82"  # of every PNG


def mend(run: Run, spec: Spec, classes: int | None = None) -> None:
    """Set right what can be set right, before anything is read; every loss is noted. Where the
    number of ``classes`` is known, observations must announce it."""
    for leftover in list(run.root.rglob(f".*{UNFINISHED}")):
        leftover.unlink()
    for path in (run.canaries, run.summary_path):
        _drop_damaged(run, path)
    _mend_rounds(run, spec, classes)
    _mend_memories(run)


def _drop_damaged(run: Run, path: Path) -> None:
    """Throw a JSON file away that is damaged, and say so."""
    try:
        read_json(path)
    except FileNotFoundError:
        return
    except DamagedError:
        path.unlink()
        _note(run, path, "was damaged and is made again")


def _note(run: Run, path: Path, words: str) -> None:
    name = path.absolute().relative_to(run.root.absolute()).as_posix()
    run.note("mended", f"'{name}' {words}", file=name)


def drop_unusable(run: Run, job: Job) -> None:
    """Throw a result away that is damaged, or made from another observation, by another attack or
    by other code of the same."""
    if not os.path.lexists(job.result):
        _drop_damaged(run, job.failure)
        return
    try:
        result = Reconstruction.load(job.result)
    except RunError:
        job.result.unlink()
        _note(run, job.result, "was damaged and is made again")
        return
    try:
        refuse_other_result(result, job, run.spec.seed)
    except RunError as error:
        job.result.unlink()
        why = str(error).partition(";")[0]
        run.note("mended", f"{job.name}: the result is made again, {why}")
        return
    if result.made_by and result.code != code_of(job.attack.name):
        job.result.unlink()
        _forget(run, job)
        run.note("mended", f"{job.name}: the attack's code is another now, the result made again")


def _forget(run: Run, job: Job) -> None:
    """Throw away what an attack learned, if it learns."""
    learner = traits_of(create_attack(job.attack.name, **job.attack.params)).learner
    if learner is not None:
        shutil.rmtree(run.learned / learner, ignore_errors=True)


def _mend_rounds(run: Run, spec: Spec, classes: int | None) -> None:
    try:
        checkpoint = read_checkpoint(run)
    except ForeignCheckpointError as foreign:
        if run.deployed:  # its own may still be somewhere, and nobody here can make it again
            raise
        run.checkpoint.unlink()
        why = str(foreign).partition(";")[0]
        run.note("mended", f"{why}; all rounds are done again")
        return
    except RunError:
        _replace_checkpoint(run, spec)
        return
    damage = None
    if not run.deployed:
        _mend_key(run)
        damage = _first_damage(run, spec, len(checkpoint.rows), classes)
    if damage is not None:
        round_, error = damage
        of_another = isinstance(error, ForeignObservationError)
        # Weights that name no round may have changed places like the rest.
        nameless = not isinstance(error, MisplacedObservationError | VaultError)
        start = _redo(run, spec, checkpoint, 1 if of_another else round_, nameless=nameless)
        run.note("mended", f"the rounds from {start} on are done again: {error}")
    elif checkpoint.rows:
        write_rounds(run, checkpoint.rows)


def _mend_key(run: Run) -> None:
    """Have the vault say which key opens it; where that is elsewhere, its owner decides."""
    path = vault_key_path(run.vault)
    before = path.read_bytes() if path.is_file() else b""
    try:
        mended = Vault(run.vault).keys.mend() is not None and path.read_bytes() != before
    except MissingKeyError as error:
        words = str(error).removesuffix(".")
        raise MissingKeyError(
            f"{words}; where it is lost, delete the vault and the rounds are done again."
        ) from error
    if mended:
        _note(run, path, "was damaged and is made again")


def _replace_checkpoint(run: Run, spec: Spec) -> None:
    """Without its checkpoint a run has done no round; one of clients elsewhere that had done all of
    them is still over, and its last model alone is lost."""
    rows = _rows(run) if run.deployed else []
    if len(rows) == spec.train.rounds:
        write_checkpoint(run, Checkpoint(rows, {}, {}))
        _note(run, run.checkpoint, "was damaged; the model after the last round is lost")
    else:
        run.checkpoint.unlink()
        _note(run, run.checkpoint, "was damaged; all rounds are done again")


def _rows(run: Run) -> list[dict[str, Any]]:
    """The rounds by the table of them; none where that does not count them."""
    try:
        table = run.rounds.astype(object)
    except FedsimError:
        return []
    records = table.where(table.notna(), None).to_dict("records")
    rows = [{str(name): value for name, value in record.items()} for record in records]
    counted = [row.get("round") for row in rows] == list(range(1, len(rows) + 1))
    return rows if counted else []


def _first_damage(
    run: Run, spec: Spec, done: int, classes: int | None
) -> tuple[int, FedsimError] | None:
    """The first round that left something damaged or misplaced, and what."""
    observed = set(observed_rounds(spec))
    told = [(e["kind"], (e.get("round"), e.get("client"))) for e in run.events()]
    absent = {where for kind, where in told if kind in ABSENT}
    unkept = {where for kind, where in told if kind == "update_rejected"}  # not of any form
    for round_ in range(1, done + 1):
        try:
            if round_ in observed:
                read_weights(weights_path(run.observations, round_), round_, spec.digest())
            for client in spec.cohort(round_):
                if (round_, client) in absent:
                    continue
                kept = round_ in observed and (round_, client) not in unkept
                path = run.observations / f"{observation_name(round_, client)}.json"
                refuse_foreign(path, spec, classes)
                Vault(run.vault).check(round_, client, recorded_checksum(path) if kept else None)
                if kept:
                    check_observation(path)
        except FedsimError as error:
            return round_, error
    return None


def _redo(
    run: Run, spec: Spec, checkpoint: Checkpoint, round_: int, *, nameless: bool = True
) -> int:
    """Set the run back to before a round, or to the last one before it that it can start from; from
    weights that do not name their round only where ``nameless`` says so."""
    run.canaries.unlink(missing_ok=True)
    # What a strategy remembered then is lost; one without a memory needs the weights alone.
    earlier = [] if checkpoint.state else [r for r in observed_rounds(spec) if 1 < r <= round_]
    for start in reversed(earlier):
        try:
            path = weights_path(run.observations, start)
            weights = read_weights(path, start, spec.digest(), nameless=nameless)
            memory = remembered(path)
        except FedsimError:
            continue
        write_checkpoint(run, Checkpoint(checkpoint.rows[: start - 1], weights, {}, memory))
        return start
    run.checkpoint.unlink()
    return 1


def _mend_memories(run: Run) -> None:
    """A memory with a damaged file is forgotten, and learned again from the traffic; a picture of
    it is only taken away."""
    for memory in sorted(run.learned.glob("*")) if run.learned.is_dir() else []:
        try:
            for file in sorted(memory.iterdir()):
                _check(file)
        except DamagedError as error:
            shutil.rmtree(memory)
            run.note("mended", f"what '{memory.name}' learned is learned again: {error}")
            continue
        for picture in sorted(memory.glob("*.png")):
            if not _is_whole(picture):
                picture.unlink()
                _note(run, picture, "was damaged and is left out of the report")


def _check(file: Path) -> None:
    if file.suffix == ".json":
        read_json(file)
    elif file.suffix == ".safetensors":
        read_tensors(file)


def _is_whole(picture: Path) -> bool:
    """Whether a PNG is as it was written: its parts have checksums, but for its last."""
    try:
        content = read_file(picture)
        with Image.open(io.BytesIO(content)) as opened:
            opened.verify()
    except (OSError, SyntaxError, ValueError):  # as Pillow says it
        return False
    return content.endswith(_LAST_PART)
