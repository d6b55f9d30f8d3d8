"""Precision: numbers in half of the digits, and what is done so that they are not lost."""

from __future__ import annotations

import torch
from torch import nn

from fedsim.core.precision import autocast, gradients, stored, widened


def test_a_forward_pass_computes_in_the_precision_that_is_announced() -> None:
    layer, x = nn.Linear(4, 4), torch.rand(2, 4)
    for precision in ("float32", "bfloat16", "float16"):
        with autocast(precision, x.device):
            assert layer(x).dtype == getattr(torch, precision)


def test_small_gradients_survive_float16() -> None:
    weight = nn.Parameter(torch.ones(1))
    loss = (weight.half() * torch.tensor(2.0**-13, dtype=torch.float16)).float() * 2.0**-14
    plain = torch.autograd.grad(loss.sum(), weight, retain_graph=True)[0]
    (scaled,) = gradients(loss.sum(), [weight], "float16")
    assert float(plain) == 0.0
    assert scaled is not None
    assert float(scaled) == 2.0**-27


def test_a_scale_that_is_too_large_is_lowered() -> None:
    weight = nn.Parameter(torch.ones(1))
    loss = (weight.half() * torch.tensor(60.0, dtype=torch.float16)).float().sum()
    (found,) = gradients(loss, [weight], "float16")
    assert found is not None
    assert float(found) == 60.0


def test_what_is_uploaded_in_half_is_computed_with_in_float32() -> None:
    sent = {"w": torch.tensor([1.0, 1 / 3]), "mask": torch.tensor([7])}
    half = stored(sent, "bfloat16")
    assert half["w"].dtype == torch.bfloat16
    assert half["mask"] is sent["mask"]
    back = widened(half)
    assert back["w"].dtype == torch.float32
    assert torch.equal(back["w"], half["w"].float())
    assert widened(sent)["w"] is sent["w"]


def test_a_loss_that_goes_past_what_is_trained_has_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert gradients(torch.tensor(1.0), [weight], "float32") == [None]
    assert gradients(torch.tensor(1.0), [weight], "float16") == [None]
