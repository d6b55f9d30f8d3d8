"""The vocabulary of the testbed: spec, model, learning, observation, knowledge, vault, metrics.

Nothing here imports attacks, defenses, clients or the modules above it.
"""
