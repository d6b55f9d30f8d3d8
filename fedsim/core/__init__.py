"""The vocabulary of the testbed: spec, models, learning, wire, observation, knowledge, vault, run,
files, metrics.

Nothing here imports attacks, defenses, clients or the packages built on them.
"""
