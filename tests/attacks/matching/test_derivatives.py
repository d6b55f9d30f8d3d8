"""The choice of a derivative, made on the model at hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from fedsim.attacks.matching.derivatives import choose_way
from fedsim.attacks.matching.matcher import GradientMatcher, Matcher, Way
from fedsim.attacks.matching.objectives import Cosine, Target
from tests.attacks.matching.conftest import pictures, target_of, tiny


class Kinked(nn.Module):
    """A network whose second derivative the difference of two passes cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steep = torch.sin(3e5 * self.head.weight.sum() * x.flatten(1).mean(1, keepdim=True))
        return self.head(x.flatten(1)) + steep


def test_auto_takes_first_order_where_it_agrees_and_double_where_not() -> None:
    labels = torch.tensor([1])

    def maker(model: nn.Module, target: Target) -> Callable[[Way], Matcher]:
        return lambda way: GradientMatcher(copy.deepcopy(model), target, Cosine(), way=way)

    smooth = tiny()
    target = target_of(smooth, pictures(1, 1, 4), labels)
    start = pictures(1, 2, 4)[None]
    matcher, words = choose_way(maker(smooth, target), "auto", start, labels[None])
    assert matcher.way == "first_order"
    assert "first_order" in words

    torch.manual_seed(0)
    rough = Kinked()
    target = target_of(rough, pictures(1, 1, 4), labels)
    matcher, words = choose_way(maker(rough, target), "auto", start, labels[None])
    assert matcher.way == "double"
    assert "disagrees" in words
    matcher, _ = choose_way(maker(rough, target), "first_order", start, labels[None])
    assert matcher.way == "first_order"
