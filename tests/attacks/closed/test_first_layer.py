"""The first layer is found by what a picture and its gradient do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks.closed.first_layer import first_layer, gradients_at
from fedsim.core.errors import AttackError
from fedsim.core.imprinted import Imprinted
from fedsim.core.mlp import Mlp
from tests import perceptrons


def test_of_an_mlp_it_is_the_first_linear_layer_in_order() -> None:
    layer = first_layer(Mlp(img_size=8, hidden=[40, 20]), 8, "spear")
    assert (layer.weight, layer.bias) == ("1.weight", "1.bias")
    rows = torch.rand(2, 192)
    assert torch.equal(layer.fold(rows, 8), rows.view(2, 3, 8, 8))


def test_pixels_in_another_order_are_put_in_theirs() -> None:
    net = perceptrons.CalledRelu()
    layer = first_layer(net, 16, "spear")
    pictures = torch.rand(2, 3, 16, 16)
    assert torch.equal(layer.fold(net.flat(pictures), 16), pictures)


def test_a_module_of_bins_before_a_model_is_one() -> None:
    net = Imprinted(Mlp(img_size=8, hidden=[20]), 8, 30)
    assert first_layer(net, 8, "spear").weight == "imprint_first.weight"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (perceptrons.NormedMlp, "a norm or a dropout"),
        (perceptrons.DroppedMlp, "a norm or a dropout"),
        (perceptrons.Noisy, "nothing random"),
        (perceptrons.WeightsComputed, "weights are made of other parameters"),
        (perceptrons.Patchwise, "begins otherwise"),
    ],
)
def test_what_is_none_is_told(kind: type[nn.Module], words: str) -> None:
    net = kind().train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(AttackError, match=words):
        first_layer(net, 16, "spear")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_model_without_numbers_is_told() -> None:
    with torch.device("meta"):
        net = Mlp(img_size=8, hidden=[20])
    with pytest.raises(AttackError, match="without numbers"):
        first_layer(net, 8, "spear")


def test_the_gradient_at_a_layer_is_that_of_its_output() -> None:
    net = Mlp(img_size=4, num_classes=3, hidden=[5]).double()
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    pull = torch.rand(2, 3, dtype=torch.float64)
    at = gradients_at(net, net[1], images, pull)
    expected = (pull @ net[3].weight) * (net[1](images.flatten(1)) > 0)
    assert torch.allclose(at.gradient, expected)
    assert torch.equal(at.gave, net[1](images.flatten(1)))
    assert all(parameter.grad is None for parameter in net.parameters())
