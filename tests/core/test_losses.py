"""Losses: cross-entropy as torch has it, with what is announced of labels and classes."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from fedsim.core.errors import SpecError
from fedsim.core.losses import Loss, balanced_weights, dominant, refuse_other_classes

COIN = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(4, 3, generator=COIN), torch.tensor([0, 1, 1, 2])
MIXTURES = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.6, 0.4], [0.0, 1.0, 0.0], [0.1, 0.0, 0.9]])


def test_the_default_is_plain_cross_entropy_to_the_last_bit() -> None:
    assert torch.equal(Loss()(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS))


def test_smoothing_and_weights_are_torchs() -> None:
    loss = Loss(label_smoothing=0.1, weights=(1.0, 2.0, 0.5))
    weights = torch.tensor([1.0, 2.0, 0.5])
    expected = F.cross_entropy(LOGITS, LABELS, weights, label_smoothing=0.1)
    assert torch.equal(loss(LOGITS, LABELS), expected)


def test_mixed_labels_are_learned_as_the_mixture_or_as_their_dominant_class() -> None:
    by_hand = -(MIXTURES * LOGITS.log_softmax(-1)).sum(1).mean()
    torch.testing.assert_close(Loss()(LOGITS, MIXTURES), by_hand)
    assert dominant(MIXTURES).tolist() == [0, 1, 1, 2]
    whole = Loss(soft="dominant")(LOGITS, MIXTURES)
    assert torch.equal(whole, F.cross_entropy(LOGITS, LABELS))


def test_logits_in_half_precision_are_compared_in_float32() -> None:
    assert Loss()(LOGITS.bfloat16(), LABELS).dtype == torch.float32


def test_balanced_weights_are_of_one_clients_own_counts_and_known_to_it_alone() -> None:
    weights = balanced_weights(torch.tensor([6, 2, 0]))
    assert weights == pytest.approx((8 / 18, 8 / 6, 8 / 3))
    announced = Loss(weights="balanced")
    assert announced.known_weights is None
    assert torch.equal(announced(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS))
    own = announced.balanced_by(weights)
    assert own.known_weights == weights
    assert Loss().balanced_by(weights) == Loss()


def test_weights_for_other_classes_are_refused_in_a_sentence() -> None:
    with pytest.raises(SpecError, match="2 numbers, and the data set has 3 classes"):
        refuse_other_classes(Loss(weights=(1.0, 2.0)), 3)
    with pytest.raises(SpecError, match="all zero"):
        refuse_other_classes(Loss(weights=(0.0, 0.0)), 2)
    refuse_other_classes(Loss(weights="balanced"), 3)
    with pytest.raises(ValidationError):
        Loss(weights=(-1.0,))
