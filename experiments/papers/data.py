"""Where the data of the tables is, and what is made of it before they begin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.papers.kinds import HERE, Source, run_fedsim
from fedsim.attacks.generators import generator_metadata

# Trained on people whom nobody attacks (experiments/data/olivetti.py), or on no people at all.
STEPS = 1000
GENERATOR = ("--steps", str(STEPS), "channels=1", "width=24")


@dataclass(frozen=True)
class Paths:
    """Where the data is that the tables are made of."""

    cifar10: Path | None
    faces: Path | None

    def needed(self, option: Literal["cifar10", "faces"]) -> Path:
        path: Path | None = getattr(self, option)
        if path is None or not path.exists():
            raise SystemExit(f"these tables need --{option} PATH; choose others with --only")
        return path

    def check(self, source: Source) -> None:
        """End with a sentence where the data of some tables is not there."""
        if source in ("faces", "domains"):
            self.needed("faces")
        if source in ("cifar10", "largest", "random", "domains"):
            self.needed("cifar10")


def make_folder(folder: Path, *words: str) -> None:
    """What a script writes into ``-o``, all of it or nothing; what is there stays as it is."""
    if folder.is_dir():
        return
    half = folder.with_name(f"{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    command = [sys.executable, *words, "-o", str(half)]
    subprocess.run(command, check=True, cwd=HERE.parent)
    half.rename(folder)


def is_trained(generator: Path) -> bool:
    """Whether its training came to its end: a long one leaves its file on the way as well."""
    return generator.is_file() and generator_metadata(generator).get("steps") == STEPS


def prepare(source: Source, paths: Paths, root: Path) -> list[str]:
    """What a data set needs before its tables, made once; the overrides that name it."""
    if source == "any":
        return []
    if source == "cifar10":
        return [f"data.path={paths.cifar10}"]
    if source in ("largest", "random"):
        trees = root / "vulnerable"
        picking = ("pick", "--path", str(paths.cifar10), "--each", "8")
        make_folder(trees, "-m", "experiments.vulnerable", *picking)
        return [f"data.path={trees / source}"]
    faces = root / "faces"
    make_folder(faces, str(HERE / "data" / "olivetti.py"), str(paths.faces))
    if source == "faces":
        learned, name, shown = root / "faces.safetensors", "imagefolder", faces / "train"
    else:
        learned, name, shown = root / "cifar.safetensors", "cifar10", paths.needed("cifar10")
    if not is_trained(learned):
        where = ("--data", name, "--path", str(shown), "-o", str(learned))
        run_fedsim("generator", "train", *where, *GENERATOR)
    return [f"data.path={faces / 'victims'}", f"threat.generator.checkpoint={learned}"]
