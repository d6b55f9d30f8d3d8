"""Gradient matching: the search for images whose update is the one observed.

`base` turns a View into a `problem` and searches it in `stages`; a `matcher` differentiates the
matching loss; `objectives` and `priors` are its terms, `spaces` what is searched, `layers` what is
looked at. The names that most attacks are written with are exported here.
"""

from fedsim.attacks.matching.base import MatchingAttack
from fedsim.attacks.matching.batchnorm import BatchNormName, batchnorm_prior
from fedsim.attacks.matching.budget import Budget, KeepName, OptimizerName, Phases, ScheduleName
from fedsim.attacks.matching.label_rule import LabelRule
from fedsim.attacks.matching.matcher import Match
from fedsim.attacks.matching.objectives import (
    Cosine,
    LayerL2,
    Objective,
    ObjectiveName,
    PositionCosine,
    SquaredL2,
    Tag,
    Target,
    objective_of,
)
from fedsim.attacks.matching.presets import PRESET, PresetName, PresetParameters
from fedsim.attacks.matching.priors import (
    FeaturePrior,
    GroupConsistency,
    PatchPrior,
    PriorNetwork,
    Term,
    l2_norm,
    total_variation,
    total_variation_norm,
    total_variation_of,
)
from fedsim.attacks.matching.problem import Problem
from fedsim.attacks.matching.ranges import Count, Natural, Rate, Weight
from fedsim.attacks.matching.search import BestMatch, Matching, search
from fedsim.attacks.matching.spaces import Latents, Parametrisation, Pixels, Weights
from fedsim.attacks.matching.stages import Stage, Task

__all__ = [
    "PRESET",
    "BatchNormName",
    "BestMatch",
    "Budget",
    "Cosine",
    "Count",
    "FeaturePrior",
    "GroupConsistency",
    "KeepName",
    "LabelRule",
    "Latents",
    "LayerL2",
    "Match",
    "Matching",
    "MatchingAttack",
    "Natural",
    "Objective",
    "ObjectiveName",
    "OptimizerName",
    "Parametrisation",
    "PatchPrior",
    "Phases",
    "Pixels",
    "PositionCosine",
    "PresetName",
    "PresetParameters",
    "PriorNetwork",
    "Problem",
    "Rate",
    "ScheduleName",
    "SquaredL2",
    "Stage",
    "Tag",
    "Target",
    "Task",
    "Term",
    "Weight",
    "Weights",
    "batchnorm_prior",
    "l2_norm",
    "objective_of",
    "search",
    "total_variation",
    "total_variation_norm",
    "total_variation_of",
]
