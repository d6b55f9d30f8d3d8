"""Start: the images from which a search sets out, seed by seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.attacks.matching.problem import Problem
from fedsim.attacks.matching.ranges import Count
from fedsim.attacks.matching.spaces import Pixels
from fedsim.attacks.patch_solve import PatchSolve
from fedsim.core.attack import no_progress
from fedsim.core.errors import AttackError, NotGranted

StartName = Literal["noise", "uniform", "grey", "patch_solve"]


@dataclass(frozen=True, kw_only=True)
class StartParameters:
    """``seeds``: starts searched side by side, of which the best match wins; ``init``: where they
    start; ``box``: keep pixels between black and white.
    """

    seeds: Count = 1
    init: StartName = "noise"
    box: bool = True

    def pixels(self, problem: Problem) -> Pixels:
        """Plain pixels, as a space to search."""
        low, high = problem.box
        return Pixels(self.start(problem), low, high, boxed=self.box)

    def start(self, problem: Problem) -> Tensor:
        """Where the search starts: normalised images (S, B, 3, H, W)."""
        shape = (self.seeds, problem.count, 3, problem.side, problem.side)
        coin = problem.view.coin()
        noise = torch.randn(shape, generator=coin).to(problem.device)
        if self.init == "noise":
            return noise
        if self.init == "uniform":
            return problem.normalised(torch.rand(shape, generator=coin))
        if self.init == "grey":
            return problem.normalised(torch.full(shape, 0.5)) + 0.01 * noise
        return _solved(problem, noise)


def _solved(problem: Problem, noise: Tensor) -> Tensor:
    """The closed form's picture for every image, spread by ``noise``; noise where it has none."""
    try:
        solved = PatchSolve().reconstruct(problem.view, device=problem.device, progress=no_progress)
    except (AttackError, NotGranted) as error:
        problem.notes.append(f"no closed form to start from: {error}")
        return noise
    problem.notes += [f"start: patch_solve; {note}" for note in solved.notes]
    images = solved.images[:1].expand(problem.count, -1, -1, -1)
    spread = torch.full((len(noise), 1, 1, 1, 1), 0.1, device=problem.device)
    spread[0] = 0.0 if problem.count == 1 else 0.1  # the first seed starts at the solution
    return problem.normalised(images) + spread * noise
