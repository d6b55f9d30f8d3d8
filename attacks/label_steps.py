"""Label steps: counts behind the head's move over several local steps, by simulating its bias.

The gradient of a step in the head's bias is  p - k / B:  mean predictions less the shares of the
classes in its batch. Two things have to be known of p, which nobody uploads.

Under SGD the move is the sum of the gradients, so only the mean of p along the way counts: it goes
from what the mean features are predicted to be before the update to after it. A network that was
trained before predicts each picture's own label in part, p_i = (1 - l) p + l y_i, which scales all
residuals by 1 - l; the mean training loss, which clients upload beside the update, tells l.

Under Adam and AdamW every class's bias moves by a law of its own: how far, depends on how many
pictures of the class there are, and in which batches they fall. So for each class the move is
simulated for every count from none to all, in random orders, and the count is read off that curve.
Predictions begin alike for all classes and go half of the way to the counts' own shares. Derived
here; after LLG (Wainakh et al. 2022) and RLU (Ma et al. 2023), which count under SGD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core.epochs import epoch_rows
from fedsim.core.learning import Protocol

_ORDERS = 48  # random ones, in which a class's pictures fall into batches
_TURNS = 3  # of counting and following the predictions
_DRIFT = 0.5  # how far predictions go towards the counts' shares
_LEAST = 0.1  # of l: below, predictions are taken not to know their labels
_MOST = 64  # counts on a curve; between them it is straight


def trust(loss: float, predictions: Tensor, shares: Tensor) -> float:
    """l: how much of its own label each prediction holds, from the mean loss, by bisection; 0 where
    the predictions alone explain the loss, or nobody told it: a loss that is not above zero is no
    cross-entropy, but what stands where an app's clients report none."""
    if not math.isfinite(loss) or loss <= 0:
        return 0.0
    shares = shares.clamp(min=0) / shares.clamp(min=0).sum().clamp(min=1e-12)

    def told(l: float) -> float:  # noqa: E741
        return float(-(shares * ((1 - l) * predictions + l).clamp(min=1e-9).log()).sum())

    low, high = 0.0, 0.999
    if told(low) <= loss:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if told(middle) > loss else (low, middle)
    return low


def followed(sure: Tensor, wary: Tensor, gradient: Tensor, loss: float) -> Tensor:
    """Shares of the classes (C,) under SGD, from the mean gradient of the bias. ``sure`` and
    ``wary`` are the mean predictions along the way, the second averaged with the uniform one: what
    mean features are predicted to be is surer than predictions are, but for a network that knows
    nothing of the labels yet."""
    shares = wary - gradient
    if trust(loss, wary, shares) < _LEAST:
        return sure - gradient
    for _ in range(10):
        l = trust(loss, wary, shares)  # noqa: E741
        shares = wary - gradient / (1 - l)
    return shares


def read_off(
    move: Tensor, bias: Tensor, protocol: Protocol, *, count: int, steps: int, epochs: int
) -> Tensor:
    """Shares of the classes (C,) behind the ``move`` of the head's ``bias`` under Adam or AdamW."""
    classes = len(move)
    batches = _draws(count, steps, epochs)  # (R, T, K): shares of the first so many pictures
    grid = _grid(count)
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64)
    ramp = (_DRIFT * torch.arange(steps, dtype=torch.float64) / max(steps, 1))[:, None]
    for _ in range(_TURNS):
        predictions = (1 - ramp) / classes + ramp * shares
        curves = _curves(predictions, batches, bias, protocol)  # (C, K), rising
        counts = torch.stack([_where(*pair, grid) for pair in zip(curves, move, strict=True)])
        shares = counts / counts.sum().clamp(min=1e-9)
    return shares


def _grid(count: int) -> Tensor:
    return torch.linspace(0, count, min(count, _MOST) + 1, dtype=torch.float64).round()


def _draws(count: int, steps: int, epochs: int) -> Tensor:
    """In random orders, which share of each step's batch is among the first k pictures, for every k
    of the grid: (R, T, K)."""
    size = max(1, -(-count * epochs // max(steps, 1)))
    grid, coin = _grid(count), torch.Generator().manual_seed(0)
    orders = []
    for _ in range(_ORDERS):
        taken: list[Tensor] = []
        while len(taken) < steps:
            order = torch.randperm(count, generator=coin)
            taken += [order[list(rows)] for rows in epoch_rows(count, size)]
        orders.append(torch.stack([_share(rows, grid) for rows in taken[:steps]]))
    return torch.stack(orders)


def _share(rows: Tensor, grid: Tensor) -> Tensor:
    return (rows[:, None] < grid[None]).double().mean(0)


def _curves(predictions: Tensor, batches: Tensor, bias: Tensor, protocol: Protocol) -> Tensor:
    """How far each class's bias moves, (C, K), on average over the orders: predictions (T, C)."""
    smoothing, classes = protocol.loss.label_smoothing, predictions.shape[1]
    (one, two), decay = protocol.betas, protocol.weight_decay
    begin = bias.double().view(1, -1, 1)
    at = begin.expand(len(batches), -1, batches.shape[2])
    first, second = torch.zeros_like(at), torch.zeros_like(at)
    for step, rate in enumerate(protocol.rates(len(predictions)), start=1):
        seen = (1 - smoothing) * batches[:, step - 1, None] + smoothing / classes
        gradient = predictions[step - 1].view(1, -1, 1) - seen + protocol.proximal * (at - begin)
        if protocol.optimizer == "adam":
            gradient = gradient + decay * at
        else:
            at = at * (1 - rate * decay)
        first = one * first + (1 - one) * gradient
        second = two * second + (1 - two) * gradient.square()
        spread = (second / (1 - two**step)).sqrt() + 1e-8
        at = at - rate * (first / (1 - one**step)) / spread
    return torch.cummax((at - begin).mean(0), 1).values


def _where(curve: Tensor, value: Tensor, grid: Sequence[float] | Tensor) -> Tensor:
    """The count at which a rising curve has a value; its ends for what lies beyond."""
    at = int(torch.searchsorted(curve, value))
    grid = torch.as_tensor(grid, dtype=torch.float64)
    if at == 0 or at == len(curve):
        return grid[min(at, len(curve) - 1)]
    low, high = curve[at - 1], curve[at]
    share = (value - low) / (high - low).clamp(min=1e-18)
    return grid[at - 1] + share * (grid[at] - grid[at - 1])
