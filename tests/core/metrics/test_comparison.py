"""Comparisons: what several metrics start from is computed once."""

from __future__ import annotations

import torch

from fedsim.core.metrics import Batch, Comparison, fft2d, mse


def test_what_is_known_of_a_batch_is_computed_once() -> None:
    asked = []

    def mean(images: torch.Tensor) -> float:
        asked.append(images)
        return float(images.mean())

    batch = Batch(torch.full((2, 3, 8, 12), 0.25))
    assert [batch.once(mean), batch.once(mean)] == [0.25, 0.25]
    assert len(asked) == 1
    assert batch.side == 8


def test_its_parts_are_those_of_the_metrics_themselves() -> None:
    truth, guess = torch.rand(3, 3, 16, 16), torch.rand(3, 3, 16, 16)
    pair = Comparison(Batch(truth), Batch(guess))
    assert torch.equal(pair.error, mse(truth, guess))
    assert torch.allclose(pair.spectra.fft2d(), fft2d(truth, guess))
