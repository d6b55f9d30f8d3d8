"""Label rule: how a matching attack comes by its labels: granted, read, or searched as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.attacks.labels import Rule, labels_left, recover_labels
from fedsim.attacks.matching.problem import Problem
from fedsim.core.anatomy import found_in, head_names

LabelRule = Rule | Literal["joint"]


@dataclass(frozen=True, kw_only=True)
class LabelParameters:
    """``labels``: how labels are read, or ``joint`` to search them with the images."""

    labels: LabelRule = "auto"

    def find_labels(self, problem: Problem, seeds: int) -> Tensor:
        """Labels (S, B) for every seed, or the logits of soft ones (S, B, C)."""
        view, count = problem.view, problem.count // problem.copies
        if self.labels == "joint":
            coin = view.coin("labels")
            soft = torch.randn(seeds, problem.count, classes_of(problem.model), generator=coin)
            return soft.to(problem.device)
        left = labels_left(view)
        if view.grants("oracle_labels"):
            labels = view.oracle_labels
        elif left is not None and len(left) == count:
            labels = left
        else:
            labels = recover_labels(
                problem.update,
                problem.model,
                count,
                self.labels,
                protocol=view.known_protocol(),
                steps=len(problem.batches),
                epochs=problem.epochs,
            )
        return labels.to(problem.device).repeat(problem.copies).expand(seeds, -1)


def classes_of(model: nn.Module) -> int:
    """Of how many classes a model's head tells."""
    if (found := found_in(model)) is not None:
        return found.classes
    return int(dict(model.named_parameters())[head_names(model)[0]].shape[0])
