"""Scoring: reconstructions against the truth. Scores, the canary, identification, the statistics
over them, the verdict they add up to, and the privacy budgets beside it."""
