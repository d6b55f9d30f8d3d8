"""Epochs: how many steps a client takes in a round, and which samples each of them uses."""

from __future__ import annotations


def epoch_rows(count: int, batch_size: int) -> list[range]:
    """Which of ``count`` samples each step of an epoch uses; the last step may use fewer."""
    return [range(at, min(at + batch_size, count)) for at in range(0, count, batch_size)]


def steps_of_round(steps: int | None, epochs: int | None, samples: int, batch_size: int) -> int:
    """The local steps of a client with ``samples``: as many as are set, or whole epochs."""
    return epochs * len(epoch_rows(samples, batch_size)) if epochs else steps or 1


def samples_of_epoch(num_examples: int, epochs: int) -> int:
    """How many samples a client holds, from the number that it says it learned from."""
    return max(1, round(num_examples / epochs))
