"""The inverter beside matching and solving, under defenses that leave little of a gradient.

    python -m experiments.inverter -o DIR --cifar10 PATH [--only "cifar10 sign"] [key=value ...]

PATH holds cifar10_train_jpeg.zip and cifar10_test_jpeg.zip: clients hold pictures of the test zip,
the server has pictures of the other. `photos` are the built-in ones; the server then has CIFAR-10
(`photos`), or crops of seven other photographs alone (`photos, few`). For each setting it prints
mean PSNR over the victims with its 95 % interval and, against the best of the others (of the mean,
in hindsight: they get the better of several weights of total variation), the paired difference. A
run that is there is not done again. ``key=value`` overrides the spec, experiments/inverter.yaml;
``--course KEY=VALUE`` a parameter of the inverter.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import yaml
from torch import Tensor

import fedsim
from experiments.table import interval
from fedsim.clients.data import ImageSet
from fedsim.core.files import read_json
from fedsim.core.natural import natural_pictures
from fedsim.core.run import Run, list_lessons
from fedsim.core.spec import DataSpec

SPEC = Path(__file__).with_name("inverter.yaml")
INVERTER = "inverter"
DEFENSES = {
    "none": "defenses=[]",
    "sign": "defenses=[{name: quantization, kind: sign}]",
    "top-k": "defenses=[{name: top_k, sparsity: 0.95}]",
}


class Natural(ImageSet):
    """Crops of photographs that come with packages, and that `photos` does not deal out."""

    def __init__(self, data: DataSpec, split: str):
        self._pictures = natural_pictures(data.image_size)
        self.classes = ("natural",)
        self.labels = np.zeros(len(self._pictures), dtype=np.int64)

    def image(self, index: int) -> Tensor:
        return self._pictures[index]


def settings(cifar10: Path) -> dict[str, list[str]]:
    """Whose pictures are attacked and what the server has: overrides of the spec by name."""
    train, test = (cifar10 / f"cifar10_{split}_jpeg.zip" for split in ("train", "test"))
    owned = f"threat.surrogate.path={train}"
    photos = ["data.name=photos", "data.path=null"]
    few = ["threat.surrogate={name: 'experiments.inverter:Natural', pictures: 24}"]
    sources = {"cifar10": [f"data.path={test}", owned], "photos": [*photos, owned]}
    sources["photos, few"] = [*photos, *few]
    return {
        f"{source} {defense}": [*overrides, declared]
        for source, overrides in sources.items()
        for defense, declared in DEFENSES.items()
    }


def audited(folder: Path, overrides: list[str]) -> tuple[Run, str]:
    """The audit in this folder, and what it took."""
    began, worked = time.perf_counter(), time.process_time()
    run = fedsim.audit(SPEC, *overrides, output=folder)
    wall, own = time.perf_counter() - began, time.process_time() - worked
    return run, f"audited in {wall:.0f} s, {own:.0f} of them of a processor's time"


def lines_of(run: Run) -> list[str]:
    """The table of one setting, the paired difference, and what the network said of itself."""
    table = run.scores.groupby(["client", "attack"], sort=False)["psnr"].mean().unstack("attack")
    lines = ["| attack | PSNR, dB |", "|---|---|"]
    lines += [f"| {name} | {interval(table[name].dropna().to_numpy())} |" for name in table]
    others = table.drop(columns=INVERTER)
    best = str(others.mean().idxmax())
    apart = (table[INVERTER] - table[best]).dropna().to_numpy()
    lines += ["", f"- inverter - {best}: {interval(apart, 2)} dB over {len(apart)} pictures"]
    for memory in sorted(run.learned.iterdir()):
        for lesson in map(read_json, list_lessons(memory)):
            lines += [f"- {note}; {lesson['seconds']:.0f} s" for note in lesson["notes"]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--only", action="append", help="these settings, by their titles")
    parser.add_argument("--course", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    course = dict(pair.split("=", 1) for pair in options.course)
    attacks = yaml.safe_load(SPEC.read_text())["attacks"]
    attacks[0] |= {key: yaml.safe_load(value) for key, value in course.items()}
    for title, overrides in settings(options.cifar10.absolute()).items():
        if options.only and title not in options.only:
            continue
        folder = options.output / title.replace(", ", "-").replace(" ", "-")
        run, took = audited(folder, [*overrides, f"attacks={attacks}", *options.overrides])
        print("\n".join([f"## {title}", "", *lines_of(run), f"- {took}", ""]), flush=True)


if __name__ == "__main__":
    main()
