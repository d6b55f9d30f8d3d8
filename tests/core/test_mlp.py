"""The plain network of linear layers."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from fedsim.core.mlp import Mlp


def test_timm_builds_it_by_name() -> None:
    net = timm.create_model("mlp", img_size=16, num_classes=3, hidden=[20, 10])
    assert isinstance(net, Mlp)
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 3)


def test_it_is_a_plain_chain_of_what_was_asked_for() -> None:
    net = Mlp(img_size=8, hidden=[20, 10], activation="tanh", bias=False, head_bias=False)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Flatten, nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert net[1].weight.shape == (20, 192)
    assert net[1].bias is None
    assert net.get_classifier().bias is None


def test_what_it_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match="activation must be one of relu"):
        Mlp(activation="swish")
    with pytest.raises(ValueError, match="no pretrained weights"):
        timm.create_model("mlp", pretrained=True)
