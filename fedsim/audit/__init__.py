"""The audit: rounds, campaign, scores and report, one after the other; what repairs a damaged run,
and what attacks captured observations without a federation."""
