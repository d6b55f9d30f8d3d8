"""The federation: rounds on the server's side. A strategy that keeps every reply and lets another
aggregate, the checkpoint it goes on from, the grids that reach its clients; `engines`, which run
them, bring Ray and are opened by name."""

from __future__ import annotations

import fedsim.core.environment  # noqa: F401  before Flower or Ray is imported
from fedsim.federation.aggregation import create_strategy
from fedsim.federation.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from fedsim.federation.strategy import AdversarialStrategy

__all__ = [
    "AdversarialStrategy",
    "Checkpoint",
    "create_strategy",
    "read_checkpoint",
    "write_checkpoint",
]
