"""The audit: rounds, campaign, scores and report, one after the other; the repair of a damaged run,
and attacks on captured observations without a federation."""
