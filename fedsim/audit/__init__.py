"""The audit: rounds, campaign, scores and report, one after the other; what repairs a damaged run,
and what attacks captured observations without a federation."""

from __future__ import annotations

from fedsim.audit.repair import mend
from fedsim.audit.replay import attack_offline
from fedsim.audit.stages import attack_captured, audit, conclude, federate
from fedsim.audit.tensorboard import Events

__all__ = ["Events", "attack_captured", "attack_offline", "audit", "conclude", "federate", "mend"]
