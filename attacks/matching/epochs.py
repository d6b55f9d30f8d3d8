"""Epochs: pictures that are searched apart in every epoch, because nobody tells their order.

A client that goes over its pictures several times takes them in another order each time, and which
picture was in which step only it knows. With ``order: free`` every epoch has pictures of its own,
which fall into its steps as they like, and what all epochs show must agree as a whole: a prior on
the distance between what two epochs show, without regard to order (after Dimitrov et al. 2022). At
the end each picture is the mean of its partners in all epochs.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.attacks.matching.priors import Term

_BLURS = (1, 4)  # sizes of the cells that are compared


def spread_rows(count: int, batch: int, epochs: int) -> list[list[int]]:
    """Which pictures each step of each epoch uses, all epochs apart. Pictures are ordered by their
    labels, so a step takes them at equal distances: batches of a random order hold every class."""
    steps = -(-count // batch)
    dealt = [[*range(step, count, steps)] for step in range(steps)]
    return [[epoch * count + row for row in rows] for epoch in range(epochs) for rows in dealt]


def agreement(weight: float, copies: int) -> Term:
    """The prior that all epochs show the same pictures, in whatever order."""

    def apart(images: Tensor, done: float = 0.0) -> Tensor:
        """The mean squared distance (S,) of every two epochs' mean picture and mean square."""
        epochs = images.unflatten(1, (copies, -1))  # (S, E, B, 3, H, W)
        total = images.new_zeros(len(images))
        for size in _BLURS:
            shown = epochs
            if size > 1 and images.shape[-1] >= size:
                shown = torch.nn.functional.avg_pool2d(epochs.flatten(0, 2), size)
                shown = shown.unflatten(0, epochs.shape[:3])
            for whole in (shown.mean(2), shown.square().mean(2)):
                middle = whole.mean(1, keepdim=True)
                total = total + (whole - middle).square().flatten(1).mean(1)
        return total

    return Term("epochs", weight, apart)


def partnered(images: Tensor, labels: Tensor, copies: int) -> Tensor:
    """The pictures (B, 3, H, W) of all epochs (E B, 3, H, W), each the mean of its partners: those
    of its label that lie nearest, at the least distance in all. ``labels`` (B,) are one epoch's."""
    first, *others = images.unflatten(0, (copies, -1))
    mean = first.clone()
    for done, other in enumerate(others, start=1):
        cost = torch.cdist(mean.flatten(1).double(), other.flatten(1).double())
        strange = labels[:, None] != labels[None]
        cost = cost + strange.to(cost) * (1 + cost.max())
        rows, columns = linear_sum_assignment(cost.cpu().numpy())
        mean[rows] = (done * mean[rows] + other[columns]) / (done + 1)
    return mean
