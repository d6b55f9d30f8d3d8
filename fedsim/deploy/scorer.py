"""The scorer: whoever may see the truth of a deployed run, in a directory of its own.

The run lies where its server and the attack workers read it, and the truth with the clients. Both
are brought together in a third directory, for its owner alone, which is a run like any other: it is
scored and reported there, and nothing of it goes back to the server's side.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import UNFINISHED, read_json, write_json
from fedsim.core.keyring import key_folders
from fedsim.core.run import Run, paths
from fedsim.core.vault import Vault

SOURCE = "source.json"  # which run a scored one was taken from
LEFT = {  # of the server's run: what it had no right to, and what is made anew
    *(paths.VAULT, paths.SPOOL, paths.LOCK, paths.OFFLINE, SOURCE),
    *(paths.SCORES, "scores.parquet", paths.SUMMARY, paths.CANARIES),
    *(paths.REPORT, paths.REDACTED_REPORT, paths.GRID, paths.SUBMISSIONS),
}


def gather(run: Run, vaults: list[Path], output: Path) -> Run:
    """The run and what its clients kept, together in ``output``; said again, taken anew."""
    truths = _truths(vaults)
    _refuse(run, output)
    scored = Run(output)
    try:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        output.chmod(0o700)
        with scored.locked(), run.locked():
            _take_run(run, output)
            _take_truths(truths, scored.vault)
    except OSError as error:
        raise RunError(f"'{output}' cannot be written: {error.strerror or error}.") from error
    return scored


def _truths(vaults: list[Path]) -> dict[str, Vault]:
    """Every file of the clients' vaults by its name, and the vault that has it."""
    truths: dict[str, Vault] = {}
    for folder in vaults:
        # The key of a client elsewhere lies beside its vault.
        beside = folder.absolute().parent / paths.VAULT_KEYS
        vault = Vault(folder, folders=[beside, *key_folders()])
        files = sorted(folder.rglob("[!.]*.safetensors")) if folder.is_dir() else []
        if not files:
            raise RunError(f"'{folder}' is no vault: it holds no truth of any client.")
        vault.keys.require()
        for file in files:
            name = file.relative_to(folder).as_posix()
            other = truths.setdefault(name, vault)
            if other is not vault:
                raise RunError(
                    f"'{other.root / name}' and '{file}' are both the truth of the same client and "
                    f"round."
                )
    return truths


def _refuse(run: Run, output: Path) -> None:
    """Raise for a directory that the server's side reads, or that holds something else."""
    if (run.root / SOURCE).is_file():
        raise RunError(
            f"'{run.root}' was scored already, from '{_source(run.root)}': `fedsim report` writes "
            f"its report again."
        )
    here, there = output.resolve(), run.root.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise RunError(
            f"'{output}' is where the server's side reads; score into a directory of your own: "
            f"-o DIR."
        )
    held = [entry for entry in output.iterdir() if not _passes(entry)] if output.is_dir() else []
    if (held and _source(output) != str(there)) or (output.exists() and not output.is_dir()):
        raise RunError(f"'{output}' holds something else; choose another directory.")


def _passes(entry: Path) -> bool:
    """What is left where this was killed at its beginning, or is under way."""
    return entry.name == paths.LOCK or entry.name.endswith(UNFINISHED)


def _source(root: Path) -> str | None:
    """The run that a scored one was taken from."""
    try:
        about: Any = read_json(root / SOURCE)
    except (FileNotFoundError, DamagedError):
        return None
    return str(about.get("run")) if isinstance(about, dict) else None


def _take_run(run: Run, output: Path) -> None:
    """What the server has, without what an earlier score left here."""
    write_json(output / SOURCE, {"run": str(run.root.resolve())})
    for left in output.iterdir():
        if left.is_dir() and not left.is_symlink():
            if left.name != paths.SUBMISSIONS:  # each says of which updates it is
                shutil.rmtree(left)
        elif left.name not in (SOURCE, paths.LOCK):
            left.unlink()
    for entry in sorted(run.root.iterdir()):
        if entry.name in LEFT or _passes(entry) or entry.is_symlink():
            continue
        if entry.is_dir():
            shutil.copytree(entry, output / entry.name, symlinks=True, copy_function=_take)
        else:
            shutil.copy2(entry, output / entry.name)


def _take(source: str, target: str) -> None:
    """A second name for a file, which costs nothing; a copy on another disk. Files are replaced,
    never changed, so neither side sees what the other does."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _take_truths(truths: dict[str, Vault], root: Path) -> None:
    """The truths under a key of the scorer's own."""
    own = Vault(root)
    for name, vault in truths.items():
        own.take(vault, name)
