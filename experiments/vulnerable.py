"""Vulnerable population: does a large gradient mean a leaky client?

    python experiments/vulnerable.py RUN

For every attack of a finished audit, the rank correlation (Spearman) between the norm of each
update, which the server sees, and how well it was reconstructed, over all attacked updates.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scipy.stats import spearmanr

from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    run = Run(parser.parse_args().run)
    scores = run.scores
    norms = {}
    for round_, client in scores[["round", "client"]].drop_duplicates().itertuples(index=False):
        update = read_observation(observation_path(run.observations, round_, client)).update
        norms[round_, client] = sum(float(t.square().sum()) for t in update.tensors.values()) ** 0.5
    print("| attack | PSNR | p | SSIM | p | updates |\n|---|---|---|---|---|---|")
    for attack, rows in scores.groupby("attack", sort=False):
        means = rows.groupby(["round", "client"])[["psnr", "ssim"]].mean()
        sizes = [norms[key] for key in means.index]
        cells = []
        for column in ("psnr", "ssim"):
            rank, chance = spearmanr(sizes, means[column])
            cells += [f"{rank:+.2f}", f"{chance:.2f}"]
        print(f"| {attack} | {' | '.join(cells)} | {len(means)} |")


if __name__ == "__main__":
    main()
