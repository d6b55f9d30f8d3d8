"""DeepInversion (Yin et al. 2020): pictures of given classes out of a model, without any gradient.

Cross-entropy to the labels, total variation, l2 and the BatchNorm statistics that the model
remembers: the baseline of GradInversion and GradViT. Of the update it takes the labels alone, so
what it shows is what the *model* says of its classes, and not what the client's pictures were.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.matching import (
    PRESET,
    BatchNormName,
    Count,
    FeaturePrior,
    KeepName,
    LabelRule,
    Match,
    MatchingAttack,
    Natural,
    Objective,
    OptimizerName,
    Phases,
    PresetParameters,
    Problem,
    Rate,
    ScheduleName,
    SquaredL2,
    Task,
    Term,
    Weight,
    batchnorm_prior,
    l2_norm,
    total_variation_of,
)
from fedsim.attacks.matching.matcher import silence
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View


@dataclass(frozen=True, kw_only=True)
class DeepInversion(PresetParameters, MatchingAttack):
    """``preset`` paper: the coefficients of the authors' code for ResNet-50 at 224. ``batchnorm``:
    as in `grad_inversion`; the paper's are ``running``, those of the model that was sent."""

    uses: ClassVar[frozenset[str]] = MatchingAttack.uses | {"batch_statistics"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            **{"steps": 20_000, "lr": 0.25, "tv": 1e-4, "l2": 1e-5, "bn": 0.01},
            **{"optimizer": "adam", "schedule": "cosine", "keep": "total"},
            **{"box": False, "warmup": 100},
        },
        "cpu": {
            **{"steps": 400, "lr": 0.1, "tv": 0.5, "l2": 0.0, "bn": 0.1},
            **{"optimizer": "adam", "schedule": "cosine", "keep": "total"},
            **{"box": True, "warmup": 0},
        },
    }

    steps: Count = PRESET
    lr: Rate = PRESET
    optimizer: OptimizerName = PRESET
    schedule: ScheduleName = PRESET
    keep: KeepName = PRESET
    box: bool = PRESET
    warmup: Natural = PRESET
    tv: Weight = PRESET
    l2: Weight = PRESET
    bn: Weight = PRESET
    bn_first: Weight = 10.0
    batchnorm: BatchNormName = "running"
    labels: LabelRule = "auto"

    def objective(self, problem: Problem) -> Objective:
        return SquaredL2()  # of nothing: no gradient is compared

    @property
    def feels_size(self) -> bool:
        return False

    def phases(self) -> Phases:
        return ((0.0, 1.0),)

    def terms(self, problem: Problem) -> list[Term]:
        variation = Term("tv", self.tv, total_variation_of(self.preset))
        return [variation, Term("l2", self.l2, l2_norm)]

    def features(self, problem: Problem) -> FeaturePrior | None:
        return batchnorm_prior(problem, self.batchnorm, self.bn, self.bn_first, matched=False)

    def refuse_labels(self) -> None:
        if self.labels == "joint":
            raise AttackError("deep_inversion makes pictures of given labels; recover them.")

    def task(self, view: View, device: torch.device) -> Task:
        self.refuse_labels()
        problem = self.problem(view, device)
        labels = self.find_labels(problem, self.seeds)
        problem.labels = labels[0]
        matcher = Classified(problem.model, self.features(problem))
        return Task(problem, matcher, labels, f"{self._in_words()} {sorted(view.granted)}")


class Classified:
    """How surely a model takes images for their labels, in the place of a matching loss."""

    def __init__(self, model: nn.Module, features: FeaturePrior | None = None):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        silence(self.model)
        self.features = features
        self.notes = ["no gradient is matched: the labels and the model alone"]

    def __call__(self, images: Tensor, labels: Tensor) -> Match:
        found = [self._one(x, y) for x, y in zip(images, labels, strict=True)]
        values, derivatives = zip(*found, strict=True)
        return Match(torch.stack(values), torch.stack(derivatives), None)

    def value(self, images: Tensor, labels: Tensor) -> Tensor:
        return self(images, labels).value

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """There is nothing that changes."""

    def _one(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = images.detach().requires_grad_(True)
            if self.features is None:
                loss = F.cross_entropy(self.model(x), labels)
            else:
                with self.features.listening(self.model):
                    loss = F.cross_entropy(self.model(x), labels)
                    loss = loss + self.features.penalty()
            (derivative,) = torch.autograd.grad(loss, x)
        return loss.detach(), derivative
