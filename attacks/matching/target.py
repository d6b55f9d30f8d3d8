"""Target: the layers of an update that are matched, as the gradient they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor, nn

from fedsim.attacks.matching.layers import Blocks, Part, select
from fedsim.attacks.matching.objectives import Objective, Target, is_scale_free
from fedsim.attacks.matching.problem import UNKNOWN_SIZE, Problem
from fedsim.attacks.pulls import momentum_pull
from fedsim.core.errors import AttackError
from fedsim.core.spec import Upload


@dataclass(frozen=True, kw_only=True)
class TargetParameters:
    """``parts`` and ``blocks``: which layers are matched alone; ``without`` and ``without_blocks``:
    which are left out of all the others."""

    parts: list[Part] | None = None
    blocks: Blocks | None = None
    without: list[Part] | None = None
    without_blocks: Blocks | None = None

    def selected(self, model: nn.Module, names: Iterable[str]) -> list[str]:
        """The layers of ``names`` that are matched."""
        return select(
            model,
            names,
            parts=self.parts,
            blocks=self.blocks,
            without=self.without or (),
            without_blocks=self.without_blocks,
        )

    def target(self, problem: Problem, objective: Objective, dtype: torch.dtype) -> Target:
        """What a simulated client's gradient, or delta, is compared with."""
        update = problem.update
        names = self.selected(problem.model, update.tensors)
        wanted = {n: update.tensors[n].to(problem.device).to(dtype) for n in names}
        unrolled = problem.local == "unroll"
        match update.kind:
            case Upload.GRADIENT if unrolled:  # see unrolled_protocol
                wanted = {name: -tensor for name, tensor in wanted.items()}
            case Upload.DELTA if not unrolled:
                wanted = _as_gradient(problem, wanted, objective)
            case Upload.GRADIENT | Upload.DELTA:
                pass  # compared as it is
            case other:
                assert_never(other)
        return Target(wanted, masked=problem.masked)


def _as_gradient(
    problem: Problem, delta: dict[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """The mean gradient behind a weight delta, as far as the protocol is known."""
    view = problem.view
    if problem.local == "surrogate" or not view.grants("learning_rate"):
        if not is_scale_free(objective):
            raise AttackError(UNKNOWN_SIZE)
        return {name: -tensor for name, tensor in delta.items()}
    pull, decay = float(len(problem.batches)), 0.0
    if view.grants("optimizer"):
        decay = view.protocol().weight_decay
        pull = momentum_pull(view.protocol(), len(problem.batches))
    weights = dict(problem.model.named_parameters())
    scale = 1 / (view.learning_rate * pull)
    return {n: -scale * t - decay * weights[n].detach() for n, t in delta.items()}
