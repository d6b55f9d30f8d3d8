"""Scoring: reconstructions against the truth. Scores, the canary, identification, the statistics
over them, and the verdict they add up to."""
