"""GradInversion (Yin et al. 2021): batches, by layers, BatchNorm and consistency over seeds.

alpha_G sum_l |g_l - g*_l| + TV + l2 + BN statistics + group consistency over seeds, Adam with
warm-up and cosine decay, and Langevin noise after every step (their sections 3.3 to 3.5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedsim.attacks.deep_inversion import BatchNormName, DeepInversion
from fedsim.attacks.matching import Budget, Count, GroupConsistency, Natural, Problem, Term, Weight


@dataclass(frozen=True, kw_only=True)
class GradInversion(DeepInversion):
    """The authors run 20,000 steps with 8 seeds. With one seed there is no group."""

    seeds: Count = 4
    warmup: Natural = 50
    batchnorm: BatchNormName = "auto"
    group: Weight | None = None
    registered: bool = True

    def terms(self, problem: Problem) -> list[Term]:
        group = Term("group", self.weight("group"), GroupConsistency(self.registered))
        return [*super().terms(problem), group]

    def budget(self) -> Budget:
        return replace(super().budget(), langevin=self.weight("langevin"))
