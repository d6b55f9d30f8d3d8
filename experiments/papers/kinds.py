"""What a table of a paper is made by: an audit of a spec, or a script that prints it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.papers.budget import at_paper_budget, is_papers_own
from experiments.table import lines_of
from fedsim.core.errors import FedsimError
from fedsim.core.files import write_atomically
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec

HERE = Path(__file__).parents[1]  # specs and scripts are named from there
PRINTED, SAID = "table.md", "words.json"  # a script's table, and the words that it was asked by
Source = Literal["cifar10", "faces", "domains", "largest", "random", "any"]


@dataclass(frozen=True)
class Table:
    """One audit: a spec, what is changed in it, and the attack that differences are taken from.
    ``{root}`` in an override is the folder of all tables; ``after``: those that come first."""

    name: str
    spec: str
    overrides: tuple[str, ...] = ()
    against: str = "prior_only"
    data: Source = "cifar10"
    after: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        return f"experiments/{self.spec}"

    def done(self, root: Path) -> bool:
        """Scored and summed up, of the spec that is listed, and no job crashed: one that did is
        tried again."""
        run = Run(root / self.name)
        if not self.begun(root) or not run.is_concluded(run.spec):
            return False
        jobs = run.summary.get("failed_jobs", [])
        return all(job.get("kind") == "declined" for job in jobs)

    def begun(self, root: Path) -> bool:
        """Whether its folder holds a run of the spec that is listed, wherever its data lies."""
        folder = root / self.name
        if not (folder / "run.json").is_file():
            return False
        try:
            found = Run(folder).spec
        except FedsimError:  # it is lost: the audit says so, and what to do
            return False
        wanted = load_spec(HERE / self.spec, self._overrides(root, paper=is_papers_own(root)))
        return _placeless(found) == _placeless(wanted)

    def _overrides(self, root: Path, *, paper: bool) -> list[str]:
        overrides = [word.replace("{root}", str(root)) for word in self.overrides]
        if paper:
            overrides.append(at_paper_budget(HERE / self.spec, overrides))
        return overrides

    def lines(self, root: Path) -> list[str]:
        run = Run(root / self.name)
        faces = self.data in ("faces", "domains")
        whole = lines_of([run], mean=faces)
        if self.against not in set(run.scores["attack"]):
            return [*whole, "", f"No differences: {self.against} has no result here."]
        return [*whole, "", *lines_of([run], self.against, mean=faces)]

    def run(self, root: Path, given: Sequence[str], *, paper: bool, jobs: int) -> None:
        """The audit, gone on with where it stopped; a folder of another spec it refuses."""
        folder = root / self.name
        if self.begun(root):  # its data may have moved since: its own spec knows
            run_fedsim("audit", "--resume", str(folder), jobs=jobs)
            return
        spec, overrides = str(HERE / self.spec), self._overrides(root, paper=paper)
        run_fedsim("audit", spec, *overrides, *given, "-o", str(folder), jobs=jobs)


def _placeless(spec: Spec) -> dict[str, Any]:
    """What an experiment is, wherever its files lie."""
    content: dict[str, Any] = spec.model_dump(mode="json", exclude={"engine", "name"})
    content["data"]["path"] = None
    for part in (content["model"], content["threat"]["prior"], content["threat"]["generator"]):
        if part and part["checkpoint"]:
            part["checkpoint"] = Path(part["checkpoint"]).name
    return content


@dataclass(frozen=True)
class Script:
    """What a script under `experiments/` prints as a table. In its words ``{path}`` is the data and
    ``{folder}`` a folder of its own, where it goes on from what is there."""

    name: str
    words: tuple[str, ...]
    data: Source = "any"
    after: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        return f"python -m experiments.{self.words[0]}"

    def done(self, root: Path) -> bool:
        """Printed, and by the words that are listed."""
        folder = root / self.name
        if not (folder / PRINTED).is_file() or not (folder / SAID).is_file():
            return False
        return bool(json.loads((folder / SAID).read_text()) == list(self.words))

    def lines(self, root: Path) -> list[str]:
        return (root / self.name / PRINTED).read_text().splitlines()

    def run(self, root: Path, given: Sequence[str], *, paper: bool, jobs: int) -> None:
        folder = root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        path = next((w.partition("=")[2] for w in given if w.startswith("data.path=")), "")
        words = [word.format(root=root, path=path, folder=folder) for word in self.words]
        command = [sys.executable, "-m", f"experiments.{words[0]}", *words[1:]]
        said = subprocess.run(
            command, check=True, cwd=HERE.parent, env=os.environ | share(jobs),
            stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        table = [line for line in said.splitlines() if line.startswith("|") or not line.strip()]
        write_atomically(folder / PRINTED, "\n".join(table).strip().encode() + b"\n")
        write_atomically(folder / SAID, json.dumps(self.words).encode())


def share(jobs: int) -> dict[str, str]:
    """The environment of one of so many processes at a time; what is set already stays."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def run_fedsim(*words: str, jobs: int = 1) -> None:
    """One command of fedsim in a process of its own, with its share of the processor."""
    command = [sys.executable, "-m", "fedsim.cli", *words]
    subprocess.run(command, check=True, cwd=HERE.parent, env=os.environ | share(jobs))
