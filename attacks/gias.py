"""GIAS (Jeon et al. 2021): gradient inversion in alternative spaces, through a generator.

Search the latents z of a trained generator first, then for each image a copy of the generator's
weights w (z/w), or its pixels (z/x). Adam with the learning rate times 0.1 at 3/8, 5/8 and 7/8 of
the steps, cosine over all layers, total variation (their section 4.1, Appendix A and H). ``x`` is
plain pixels, ``w`` a generator that nobody trained (a deep image prior).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsim.attacks.generators import (
    check_generator,
    create_generator,
    latent_size,
    latents_of,
)
from fedsim.attacks.matching import (
    PRESET,
    Count,
    FeaturePrior,
    GroupConsistency,
    KeepName,
    Latents,
    MatchingAttack,
    Objective,
    ObjectiveName,
    Parametrisation,
    Pixels,
    PresetParameters,
    Problem,
    Rate,
    ScheduleName,
    Stage,
    Task,
    Term,
    Weight,
    Weights,
    objective_of,
    total_variation,
)
from fedsim.attacks.matching.batchnorm import BatchNormName, batchnorm_prior
from fedsim.core.errors import AttackError, ModelError
from fedsim.core.observation import checksum
from fedsim.core.spec import Spec

SpaceName = Literal["x", "z", "w", "z/x", "z/w"]


@dataclass(frozen=True, kw_only=True)
class Gias(PresetParameters, MatchingAttack):
    """``space``: what is searched; after a slash, what is searched next, for ``refine`` steps.

    ``trained``: take the generator of the threat section (refused where it is not granted), or a
    fresh one of ``architecture`` and ``options``; by default the trained one, but for space w.
    ``lr``, ``lr_z``, ``lr_w``: step sizes of pixels, latents and weights. ``latent`` pulls latents
    to the middle. ``grey``: plain pixels with one channel, so that a grey generator is not compared
    with a search in colour. ``group`` holds the starts to their mean (the lazy consensus, as the
    authors' x + BN has it). ``preset`` paper: the authors' 1,500 steps on z and 5,000 on w.
    """

    uses: ClassVar[frozenset[str]] = MatchingAttack.uses | {"batch_statistics"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"steps": 1500, "refine": 5000, "keep": "last"},
        "cpu": {"steps": 500, "refine": 500, "keep": "matching"},
    }

    space: SpaceName = "z/w"
    steps: Count = PRESET
    refine: Count = PRESET
    seeds: Count = 4
    lr: Rate = 0.1
    lr_z: Rate = 0.03
    lr_w: Rate = 0.001
    schedule: ScheduleName = "step"
    keep: KeepName = PRESET
    cost: ObjectiveName = "cosine"
    tv: Weight = 1e-4
    latent: Weight = 0.0
    bn: Weight = 0.0
    group: Weight = 0.0
    batchnorm: BatchNormName = "auto"
    trained: bool | None = None
    architecture: str = "dcgan"
    options: Mapping[str, Any] = field(default_factory=dict)
    grey: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"generator"} if self._trained else frozenset())

    @property
    def _trained(self) -> bool:
        if self.space == "x":
            return False
        return self.trained if self.trained is not None else self.space != "w"

    def refuse_labels(self) -> None:
        if self.labels == "joint":
            raise AttackError(
                "labels: joint belongs to pixels alone; a search through a generator reads them."
            )

    def check_spec(self, spec: Spec) -> None:
        """Find out before any round runs whether a fresh generator can be made, too."""
        super().check_spec(spec)
        if self.space != "x" and not self._trained:
            self.fresh(spec.data.image_size, seed=0)

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost)

    def terms(self, problem: Problem) -> list[Term]:
        return [
            Term("tv", self.tv, total_variation),
            Term("group", self.group, GroupConsistency(labels=problem.labels)),
        ]

    def features(self, problem: Problem) -> FeaturePrior | None:
        return batchnorm_prior(problem, self.batchnorm, self.bn, first=1.0)

    def stages(self, task: Task) -> list[Stage]:
        first, _, then = self.space.partition("/")
        net = self.generator(task.problem) if self.space != "x" else None
        if net is not None:  # latents of one generator mean nothing to another
            task.fingerprint += f" {checksum(net.state_dict())}"
        maker = _Spaces(self, task, net)
        plan = [(first, self.steps)] + ([(then, self.refine)] if then else [])
        rates = {"x": self.lr, "z": self.lr_z, "w": self.lr_w}
        budget = self.budget()
        return [
            Stage(name, maker.of(name), replace(budget, steps=steps, lr=rates[name]))
            for name, steps in plan
        ]

    def generator(self, problem: Problem) -> nn.Module:
        """The generator whose space is searched."""
        if self._trained:
            return problem.view.generator().to(problem.device)
        return self.fresh(problem.side, seed=0).to(problem.device)

    def fresh(self, side: int, *, seed: int) -> nn.Module:
        """A generator that has learned nothing yet."""
        try:
            made = create_generator(
                self.architecture, {"image_size": side, **self.options}, seed=seed
            )
            check_generator(made, side)
        except ModelError as error:
            raise AttackError(str(error)) from error
        return made.requires_grad_(False)


@dataclass
class _Spaces:
    """The spaces of one attack on one task."""

    attack: Gias
    task: Task
    net: nn.Module | None

    def of(self, name: str) -> Any:
        return {"x": self.pixels, "z": self.latents, "w": self.weights}[name]

    def pixels(self, before: list[Tensor]) -> Parametrisation:
        problem, attack = self.task.problem, self.attack
        low, high = problem.box
        start = attack.start(problem)
        if before:
            with torch.no_grad():
                start = self.latents([], start=before[0]).images()
        grey = attack.grey or getattr(self.net, "channels", 3) == 1
        return Pixels(start, low, high, boxed=attack.box, grey=grey)

    def latents(self, before: list[Tensor], start: Tensor | None = None) -> Parametrisation:
        problem, net = self.task.problem, self._net()
        start = self._drawn() if start is None else start
        return Latents(
            net,
            start,
            self.task.labels,
            problem.normalised,
            centre_of(net, problem.device),
            self.attack.latent,
        )

    def weights(self, before: list[Tensor]) -> Parametrisation:
        net = self._net()
        latents = before[0] if before else self._drawn()
        return Weights(net, latents, self.task.labels, self.task.problem.normalised)

    def _net(self) -> nn.Module:
        assert self.net is not None
        return self.net

    def _drawn(self) -> Tensor:
        """Latents at random, (S, B, ...)."""
        problem, net = self.task.problem, self._net()
        return draw_latents(net, self.attack.seeds, problem.count, problem.view.coin("latents"))


def draw_latents(net: nn.Module, seeds: int, count: int, coin: torch.Generator) -> Tensor:
    """Latents of ``seeds`` batches at random, on the generator's device."""
    z = torch.randn(seeds * count, latent_size(net), generator=coin).to(next(net.parameters()))
    with torch.no_grad():
        return latents_of(net, z).unflatten(0, (seeds, count))


def centre_of(net: nn.Module, device: torch.device) -> Tensor:
    """The middle of the searched space: the mean of many latents."""
    if not callable(getattr(net, "latents", None)):
        return torch.zeros(latent_size(net), device=device)
    return draw_latents(net, 1, 1024, torch.Generator().manual_seed(0))[0].mean(0)
