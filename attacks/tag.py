"""TAG (Deng et al. 2021): squared l2 plus an l1 term, made for transformers."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.attacks.matching import MatchingAttack, Objective, Problem, Tag, Weight


@dataclass(frozen=True, kw_only=True)
class TagAttack(MatchingAttack):
    """``alpha`` weighs the l1 term; the authors also search soft labels, which are read here."""

    alpha: Weight = 0.01

    def objective(self, problem: Problem) -> Objective:
        return Tag(self.alpha)
