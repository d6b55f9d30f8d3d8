"""Class shares: what the head's gradient says of a batch's labels, under the announced loss.

With targets t_i (labels of which a share e is spread over all C classes) and class weights w, the
gradient of the loss in the logits of sample i is

    ( p_i sum_c w_c t_ic  -  w * t_i ) / Z,

Z being the sum of the weights of the batch's labels, or its size where labels are mixtures. So the
head's bias gets, with m the mean weight of all classes, n the share of each class in the batch, z
the mean weight of its labels (Z = B z), and mean predictions p,

    z g_k = p_k ((1 - e) z + e m) - w_k ((1 - e) n_k + e / C).

Plain cross-entropy is e = 0, w = 1:  g = p - n, so only a class that is there can be negative. With
smoothing absent classes become negative as well, by the known w_k e / (C z): that is added back
first. z follows from the shares' sum being one. Derived here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.losses import Loss


class ClassShares(NamedTuple):
    """The share of every class in a batch, (C,), and which classes are proven to be there."""

    shares: Tensor
    present: Tensor


def class_shares(
    loss: Loss, predictions: Tensor, gradient: Tensor, *, mixed: bool = False
) -> ClassShares:
    """From the gradient of the head's bias (C,), not to scale alone, and the mean predictions (C,).
    ``mixed``: labels are mixtures of classes, which torch weighs without dividing by the weights.
    """
    if not is_bent(loss):
        return ClassShares(predictions - gradient, gradient < 0)
    smoothing, weights = loss.label_smoothing, _weights(loss, gradient)
    size = _size(loss, predictions, gradient, mixed)
    spread = weights * smoothing / len(weights)
    risen = size * gradient + spread
    if mixed and loss.known_weights is not None:
        pull = (1 + (gradient / weights).sum()) / (predictions / weights).sum()
    else:
        pull = (1 - smoothing) * size + smoothing * weights.mean()
    shares = (predictions * pull - risen) / (weights * (1 - smoothing))
    return ClassShares(shares, risen < 0)


def is_bent(loss: Loss) -> bool:
    """Whether a loss is another one than plain cross-entropy, as far as it is announced."""
    return loss.label_smoothing > 0 or loss.known_weights is not None


def unsmoothed(
    loss: Loss, predictions: Tensor, weight: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the head's weight (C, D) and bias (C,) without what label smoothing took
    from every class: rules that go by signs hold again. The features are those of the least squares
    of  dW = g h^T."""
    if not loss.label_smoothing:
        return weight, gradient
    size = _size(loss, predictions, gradient, mixed=False)
    spread = _weights(loss, gradient) * loss.label_smoothing / len(gradient) / size
    features = weight.T @ gradient / gradient.square().sum().clamp(min=1e-300)
    return weight + spread[:, None] * features, gradient + spread


def _weights(loss: Loss, like: Tensor) -> Tensor:
    """Of every class; one of weight zero says nothing of itself, and next to nothing here."""
    weights = loss.class_weights(like)
    return torch.ones_like(like) if weights is None else weights.clamp(min=1e-6)


def _size(loss: Loss, predictions: Tensor, gradient: Tensor, mixed: bool) -> float:
    """z, the mean weight of the batch's labels: solved from the shares' sum being one."""
    if loss.known_weights is None or mixed:
        return 1.0
    smoothing, weights = loss.label_smoothing, _weights(loss, gradient)
    spread, drawn = float((predictions / weights).sum()), float((gradient / weights).sum())
    above = 1 - smoothing * float(weights.mean()) * spread
    below = (1 - smoothing) * spread - drawn
    size = above / below if below else 0.0
    return min(max(size, float(weights.min())), float(weights.max()))
