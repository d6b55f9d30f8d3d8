"""Captures: runs of somebody else's Flower app, kept as observations that can be audited."""
