"""Closed forms: the frame that solves for a batch of one, and the linear solvers it stands on."""
