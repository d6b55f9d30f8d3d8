"""Scoring: reconstructions against the truth. Scores, the canary, identification, the statistics
over them, privacy budgets, and the verdict they add up to."""

from __future__ import annotations

from fedsim.scoring.canary import check_canaries
from fedsim.scoring.identification import Gallery, identification_of
from fedsim.scoring.scores import columns, load_pictures, score_jobs
from fedsim.scoring.verdict import summarise

__all__ = [
    "Gallery",
    "check_canaries",
    "columns",
    "identification_of",
    "load_pictures",
    "score_jobs",
    "summarise",
]
