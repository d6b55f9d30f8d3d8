"""What scoring costs beside LPIPS: all metrics over its forward passes alone.

    python experiments/perf/scoring.py [--count 1000] [--side 224] [--attacks 4]

``--count`` reconstructions of ``--side`` pixels, ``--attacks`` of each true picture, as a run has
them: every metric through the code that scoring uses (`fedsim.scoring.scores.Yardstick`), against
`metrics.lpips` on the same pairs, which runs its network over both pictures of each. The two take
turns on parts of the pictures, so that a busy machine slows both; the ratio is what is reported.
The gallery's features are computed once per data set and kept, and so are not part of it.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.progress import track

from fedsim.core import metrics
from fedsim.core.errors import RunError
from fedsim.scoring.identification import Gallery, feature_space
from fedsim.scoring.scores import Yardstick

GALLERY = 500


def pictures(count: int, side: int, seed: int) -> torch.Tensor:
    coin = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 16, 16, generator=coin)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    return smooth.clamp(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--attacks", type=int, default=4)
    asked = parser.parse_args()
    if reason := metrics.lpips_unavailable():
        raise RunError(reason)
    space = feature_space()
    width = space(pictures(1, asked.side, 0)).shape[1]
    features = torch.nn.functional.normalize(torch.randn(GALLERY, width), dim=1)
    gallery = Gallery(space, features, tuple(str(i) for i in range(GALLERY)))
    spent = {"lpips alone": 0.0, "all metrics": 0.0}
    batch = 4
    rounds = max(1, asked.count // (batch * asked.attacks))
    for at in track(range(rounds), "victims"):
        truth = pictures(batch, asked.side, at)
        guesses = [
            (truth + 0.1 * torch.randn(truth.shape)).clamp(0, 1) for _ in range(asked.attacks)
        ]
        began = time.perf_counter()
        for guess in guesses:
            metrics.lpips(truth, guess)
        spent["lpips alone"] += time.perf_counter() - began
        began = time.perf_counter()
        yardstick = Yardstick.of(truth, gallery)
        for guess in guesses:
            yardstick.measure(guess)
        spent["all metrics"] += time.perf_counter() - began
    scored = rounds * batch * asked.attacks
    for name, seconds in spent.items():
        print(f"{name}: {seconds:.1f} s for {scored} reconstructions of {asked.side} px")
    print(f"ratio: {spent['all metrics'] / spent['lpips alone']:.2f}")


if __name__ == "__main__":
    main()
