"""The campaign: from observations to reconstructions. The plan of a spec and its jobs; the `pools`
of workers that do them, here or on nodes that do not see this disk, bring Ray and are opened by
name."""

from __future__ import annotations

import fedsim.core.environment  # noqa: F401  before Flower or Ray is imported
from fedsim.campaign.granted_truth import secrets_of
from fedsim.campaign.jobs import Handout, Job, LessonJob
from fedsim.campaign.plan import Plan, jobs_of, labelled_attacks, lessons_of, prepare, victims
from fedsim.campaign.progress import Bars, Silent, Watch

__all__ = [
    "Bars",
    "Handout",
    "Job",
    "LessonJob",
    "Plan",
    "Silent",
    "Watch",
    "jobs_of",
    "labelled_attacks",
    "lessons_of",
    "prepare",
    "secrets_of",
    "victims",
]
