"""The Olivetti faces as folders, split by person: to train on, to tune on, and the victims.

    python experiments/data/olivetti.py olivettifaces.mat -o FACES

writes FACES/train (people 0-19), FACES/tune (20-29) and FACES/victims (30-39), ten pictures each: a
generator trained on `train` has met none of the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image
from scipy.io import loadmat

SPLITS = {"train": range(20), "tune": range(20, 30), "victims": range(30, 40)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mat", type=Path, help="olivettifaces.mat: 400 faces of 64 x 64")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    faces = loadmat(arguments.mat)["faces"].T.reshape(400, 64, 64).transpose(0, 2, 1)
    for split, people in SPLITS.items():
        for person in people:
            folder = arguments.output / split / f"person-{person:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(10):
                Image.fromarray(faces[10 * person + number]).save(folder / f"{number}.png")
    print(f"wrote {', '.join(str(arguments.output / split) for split in SPLITS)}")


if __name__ == "__main__":
    main()
