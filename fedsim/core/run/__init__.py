"""A run: the directory that holds everything an experiment made, and every path in it."""

from __future__ import annotations

from fedsim.core.run import paths
from fedsim.core.run.directory import Run
from fedsim.core.run.paths import (
    ROUND_COLUMNS,
    address_of,
    failure_path,
    lesson_path,
    list_lessons,
    list_observations,
    notebook_path,
    notice_path,
    observation_name,
    observation_path,
    result_name,
    result_path,
    sent_path,
    state_path,
    truth_path,
    vault_key_path,
    weights_path,
)

__all__ = [
    "ROUND_COLUMNS",
    "Run",
    "address_of",
    "failure_path",
    "lesson_path",
    "list_lessons",
    "list_observations",
    "notebook_path",
    "notice_path",
    "observation_name",
    "observation_path",
    "paths",
    "result_name",
    "result_path",
    "sent_path",
    "state_path",
    "truth_path",
    "vault_key_path",
    "weights_path",
]
