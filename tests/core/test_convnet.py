"""The plain convolutional network: no normalisation, no pooling, no skips."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from fedsim.core.convnet import ConvNet


def test_timm_builds_it_by_name() -> None:
    net = timm.create_model("convnet", img_size=16, num_classes=3, channels=[4, 6])
    assert isinstance(net, ConvNet)
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize(("size", "strides"), [(16, 1), (15, 2), (17, [1, 3]), (8, [2, 2])])
def test_the_head_takes_what_the_convolutions_leave(size: int, strides: int | list[int]) -> None:
    net = ConvNet(img_size=size, num_classes=5, channels=[4, 6], strides=strides)
    assert net(torch.zeros(1, 3, size, size)).shape == (1, 5)


def test_it_is_a_plain_chain_of_what_was_asked_for() -> None:
    net = ConvNet(img_size=8, channels=[4], strides=1, activation="tanh", head_bias=False)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Conv2d, nn.Tanh, nn.Flatten, nn.Linear]
    assert net.get_classifier().bias is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "swish"}, "activation must be one of relu"),
        ({"channels": [4, 4], "strides": [1]}, "must have the same length"),
    ],
)
def test_what_it_cannot_be_is_told(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ConvNet(**options)
    with pytest.raises(ValueError, match="no pretrained weights"):
        timm.create_model("convnet", pretrained=True)
