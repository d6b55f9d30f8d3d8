"""Flukes: how often an unrelated picture stands out or counts as recovered.

    python experiments/flukes.py [--data PICTURES] [--size 32] [--trials 8]

Every picture is "reconstructed" by every other one, as it is, blurred, and with the mean colour of
the true picture given for nothing; and ``--trials`` times by random smooth pictures. Whatever the
rules of a verdict find there is a false alarm. PICTURES is a tree of class/picture; without it, the
built-in photos, of which only pictures of another class are taken: those of one are crops of one
photograph.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pandas as pd
import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from fedsim.clients import images_of
from fedsim.core.metrics import psnr, psnr_registered, ssim
from fedsim.core.spec import DataSpec
from fedsim.scoring.recovery import FLAT, FLAT_SSIM, above_free, recovered, stands_out
from fedsim.scoring.scores import mean_colour

GREY = 0.45  # what the baseline answers where it knows no more


def guesses(truth: Tensor, others: Tensor, trials: int, coin: torch.Generator) -> Iterator[Tensor]:
    """Pictures (N, 3, H, W) that have nothing to do with ``truth``."""
    side = truth.shape[-1]
    small = avg_pool2d(others, side // 4)
    blurred = interpolate(small, (side, side), mode="bilinear", align_corners=False)
    yield others
    yield blurred
    for unrelated in (others, blurred):
        yield (unrelated - mean_colour(unrelated) + mean_colour(truth[None])).float().clamp(0, 1)
    random = torch.rand(trials, 3, 3, 3, generator=coin)
    yield interpolate(random, (side, side), mode="bilinear", align_corners=True)


def compared(truth: Tensor, guess: Tensor) -> pd.DataFrame:
    """The scores of each guess at one picture, beside a grey one."""
    own, grey = truth[None].expand(guess.shape), torch.full_like(truth[None], GREY)
    flat, base = psnr(truth[None], mean_colour(truth[None])), psnr(truth[None], grey)
    columns = {"psnr": psnr(own, guess), "psnr_registered": psnr_registered(own, guess)}
    columns |= {"ssim": ssim(own, guess), FLAT: flat, "psnr_baseline": base}
    columns |= {FLAT_SSIM: ssim(truth[None], mean_colour(truth[None]))}
    columns |= {"psnr_registered_baseline": base, "ssim_baseline": ssim(truth[None], grey)}
    return pd.DataFrame({name: value.expand(len(guess)).numpy() for name, value in columns.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="a tree of class/picture")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--most", type=int, default=200, help="pictures")
    parser.add_argument("--trials", type=int, default=8)
    options = parser.parse_args()
    about = {"name": "imagefolder", "path": options.data} if options.data else {}
    data = images_of(DataSpec(image_size=options.size, **about), "train")
    coin = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(data.labels), generator=coin)[: options.most].tolist()
    pictures, labels = torch.stack([data.image(row) for row in rows]), data.labels[rows]
    pairs = far = alarms = 0
    best = alike = float("-inf")
    for truth, label in track(list(zip(pictures, labels, strict=True)), transient=True):
        others = pictures[torch.from_numpy(labels != label)]
        for guess in guesses(truth, others, options.trials, coin):
            scores = compared(truth, guess)
            pairs += len(scores)
            far += int(stands_out(scores).sum())
            alarms += int(recovered(scores).sum())
            best = max(best, float((scores["psnr"] - scores[FLAT]).max()))
            alike = max(alike, float(above_free(scores, "ssim").max()))
    print(f"{len(pictures)} pictures of {options.size} px, {pairs} guesses that know nothing:")
    print(f"{far} stand out, {alarms} count as recovered")
    print(f"the closest is {best:.1f} dB above the best flat colour")
    print(f"the most alike is {alike:.2f} SSIM above the better of that and a grey picture")


if __name__ == "__main__":
    main()
