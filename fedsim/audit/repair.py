"""Repair: what a kill or a bad disk did to a run, found and set right before the run goes on.

Whatever can be computed again is thrown away and done again. A round whose observation, truth or
client state is damaged is redone from the weights that were sent in it: clients draw everything
from the spec's seed, so they do the same again. A result names by checksum the observation it was
made from, and is thrown away where that has changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fedsim.campaign.jobs import Job
from fedsim.campaign.plan import observed_rounds
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.files import UNFINISHED, read_json, read_tensors
from fedsim.core.observation import check_observation, read_weights, recorded_checksum
from fedsim.core.run import Run, observation_name, weights_path
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from fedsim.federation.checkpoint import Checkpoint, read_checkpoint, write_checkpoint, write_rounds

ABSENT = ("client_failed", "client_silent")  # events of clients that left nothing in a round


def mend(run: Run, spec: Spec) -> None:
    """Set right what can be set right, before anything is read; every loss is noted."""
    for leftover in list(run.root.rglob(f".*{UNFINISHED}")):
        leftover.unlink()
    _mend_rounds(run, spec)
    _mend_memories(run)


def drop_unusable(run: Run, job: Job) -> None:
    """Throw a result away that is damaged, or made from an observation that was made again."""
    if not job.result.is_file():
        return
    try:
        source = Reconstruction.load(job.result).observation
    except RunError:
        job.result.unlink()
        run.note("mended", f"{job.name}: the result was damaged and is made again")
        return
    if source and source != recorded_checksum(job.observation):
        job.result.unlink()
        run.note("mended", f"{job.name}: the observation is another now, the result made again")


def _mend_rounds(run: Run, spec: Spec) -> None:
    try:
        checkpoint = read_checkpoint(run)
    except RunError:
        run.checkpoint.unlink()
        run.note("mended", "the checkpoint was damaged; all rounds are done again")
        return
    damage = None if run.deployed else _first_damage(run, spec, len(checkpoint.rows))
    if damage is not None:
        round_, why = damage
        start = _redo(run, spec, checkpoint, round_)
        run.note("mended", f"the rounds from {start} on are done again: {why}")
    elif checkpoint.rows:
        write_rounds(run, checkpoint.rows)


def _first_damage(run: Run, spec: Spec, done: int) -> tuple[int, str] | None:
    """The first round that left something damaged, and what."""
    observed = set(observed_rounds(spec))
    told = [(e["kind"], (e.get("round"), e.get("client"))) for e in run.events()]
    absent = {where for kind, where in told if kind in ABSENT}
    unkept = {where for kind, where in told if kind == "update_rejected"}  # not of any form
    for round_ in range(1, done + 1):
        try:
            if round_ in observed:
                read_weights(weights_path(run.observations, round_))
            for client in spec.cohort(round_):
                if (round_, client) in absent:
                    continue
                Vault(run.vault).check(round_, client)
                if round_ in observed and (round_, client) not in unkept:
                    check_observation(run.observations / f"{observation_name(round_, client)}.json")
        except FedsimError as error:
            return round_, str(error)
    return None


def _redo(run: Run, spec: Spec, checkpoint: Checkpoint, round_: int) -> int:
    """Set the run back to before a round, or to the last one before it that it can start from."""
    run.canaries.unlink(missing_ok=True)
    # What a strategy remembered then is lost; one without a memory needs the weights alone.
    earlier = [] if checkpoint.state else [r for r in observed_rounds(spec) if 1 < r <= round_]
    for start in reversed(earlier):
        try:
            weights = read_weights(weights_path(run.observations, start))
        except FedsimError:
            continue
        write_checkpoint(run, Checkpoint(checkpoint.rows[: start - 1], weights, {}))
        return start
    run.checkpoint.unlink()
    return 1


def _mend_memories(run: Run) -> None:
    """A memory with a damaged file is forgotten, and learned again from the traffic."""
    for memory in sorted(run.learned.glob("*")) if run.learned.is_dir() else []:
        try:
            for file in sorted(memory.iterdir()):
                _check(file)
        except DamagedError as error:
            shutil.rmtree(memory)
            run.note("mended", f"what '{memory.name}' learned is learned again: {error}")


def _check(file: Path) -> None:
    if file.suffix == ".json":
        read_json(file)
    elif file.suffix == ".safetensors":
        read_tensors(file)
