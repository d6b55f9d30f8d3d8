"""Class shares: counts of labels from the head's bias, under losses that bend its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks.class_shares import class_shares, is_bent, unsmoothed
from fedsim.core.losses import Loss

COUNTS = torch.tensor([3, 1, 0, 2, 0])
LABELS = torch.repeat_interleave(torch.arange(5), COUNTS)
WEIGHTS = (0.5, 2.0, 1.0, 1.5, 3.0)
LOSSES = {
    "plain": Loss(),
    "smoothed": Loss(label_smoothing=0.2),
    "weighted": Loss(weights=WEIGHTS),
    "smoothed and weighted": Loss(label_smoothing=0.2, weights=WEIGHTS),
}


def seen(loss: Loss, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    """Predictions of samples with the same features, and the head with its gradients."""
    torch.manual_seed(0)
    head = nn.Linear(4, 5).double()
    features = torch.randn(1, 4, dtype=torch.float64).expand(len(targets), -1)
    logits = head(features)
    loss(logits, targets).backward()
    return logits[0].detach().softmax(0), features[0], head


@pytest.mark.parametrize("name", LOSSES)
def test_counts_are_exact_where_the_predictions_are_known(name: str) -> None:
    predictions, _, head = seen(LOSSES[name], LABELS)
    found = class_shares(LOSSES[name], predictions, head.bias.grad)
    torch.testing.assert_close(6 * found.shares, COUNTS.double())
    assert not bool(found.present[COUNTS == 0].any())
    assert is_bent(LOSSES[name]) == (name != "plain")


@pytest.mark.parametrize("name", ["plain", "smoothed", "weighted", "smoothed and weighted"])
def test_shares_of_mixed_labels_are_exact_too(name: str) -> None:
    mixtures = torch.tensor([[0.7, 0.3, 0, 0, 0], [0, 0, 0, 0.6, 0.4]], dtype=torch.float64)
    predictions, _, head = seen(LOSSES[name], mixtures)
    found = class_shares(LOSSES[name], predictions, head.bias.grad, mixed=True)
    torch.testing.assert_close(found.shares, mixtures.mean(0))


def test_smoothing_makes_absent_classes_negative_and_that_is_added_back() -> None:
    loss = Loss(label_smoothing=0.9)
    predictions, features, head = seen(loss, LABELS)
    assert bool((head.bias.grad < 0)[COUNTS == 0].any())  # the plain rule would be wrong
    weight, bias = unsmoothed(loss, predictions, head.weight.grad, head.bias.grad)
    assert not bool((bias < 0)[COUNTS == 0].any())
    torch.testing.assert_close(weight, torch.outer(bias, features))
