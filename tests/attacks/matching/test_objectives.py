"""Objectives: each equals its formula on a case by hand, and its derivative is autograd's."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.matching.objectives import (
    Cosine,
    LayerCosine,
    LayerL2,
    Objective,
    PositionCosine,
    SquaredL2,
    Tag,
    Target,
    objective_of,
)
from fedsim.core.errors import AttackError

OBJECTIVES: dict[str, Objective] = {
    "l2": SquaredL2(),
    "layer_l2": LayerL2(),
    "relative_l2": LayerL2(relative=True),
    "cosine": Cosine(),
    "layer_cosine": LayerCosine(),
    "tag": Tag(0.3),
    "april": PositionCosine(SquaredL2(), "b", 0.7),
}


def by_formula(name: str, g: list[torch.Tensor], t: list[torch.Tensor]) -> torch.Tensor:
    """The papers' formulas as one would write them down, for autograd."""
    cos = torch.nn.functional.cosine_similarity
    differences = [a - b for a, b in zip(g, t, strict=True)]
    squared = torch.stack([d.square().sum() for d in differences]).sum()
    if name == "l2":
        return squared
    if name == "layer_l2":
        return torch.stack([d.norm() for d in differences]).sum()
    if name == "relative_l2":
        pairs = zip(differences, t, strict=True)
        return torch.stack([d.norm() / b.norm() for d, b in pairs]).sum()
    if name == "cosine":
        flat = [torch.cat([x.flatten() for x in side]) for side in (g, t)]
        return 1 - cos(flat[0], flat[1], dim=0)
    if name == "layer_cosine":
        pairs = zip(g, t, strict=True)
        return torch.stack([1 - cos(a.flatten(), b.flatten(), dim=0) for a, b in pairs]).mean()
    if name == "tag":
        return squared + 0.3 * torch.stack([d.abs().sum() for d in differences]).sum()
    return squared - 0.7 * cos(g[1].flatten(), t[1].flatten(), dim=0)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_derivative_are_those_of_the_formula(name: str, masked: bool) -> None:
    coin = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 3, 2)] + ([] if masked else [()])
    wanted = [torch.randn(s, generator=coin).double() for s in shapes]
    if masked:
        wanted = [w * (torch.arange(w.numel()).view(w.shape) % 2) for w in wanted]
    target = Target(dict(zip("abcd", wanted, strict=False)), masked=masked)
    seeds = [torch.randn(2, *s, generator=coin).double() for s in shapes]
    found = OBJECTIVES[name]([s.clone() for s in seeds], target)
    derivative = found.derivative(target)
    norms = []
    for seed in range(2):
        own = [s[seed].clone().requires_grad_(True) for s in seeds]
        shown = [o * (w != 0) for o, w in zip(own, wanted, strict=True)] if masked else own
        value = by_formula(name, shown, wanted)
        assert float(found.value[seed]) == pytest.approx(float(value.detach()), rel=1e-9)
        expected = torch.autograd.grad(value, own)
        for layer, slope in enumerate(expected):
            mine = derivative[layer][seed]
            if masked:
                mine = mine * (wanted[layer] != 0)
            assert torch.allclose(mine, slope, atol=1e-10)
        norms.append(torch.cat([slope.flatten() for slope in expected]).norm())
    if name in ("l2", "layer_l2", "relative_l2", "cosine", "layer_cosine"):
        assert torch.allclose(found.norm, torch.stack(norms), rtol=1e-6)
    else:  # a bound is enough: it only sets a step size
        assert bool((found.norm >= torch.stack(norms) * (1 - 1e-9)).all())


def test_each_objective_on_a_case_by_hand() -> None:
    # One layer (3, 4) against (0, 4), another (1) against (1): differences (3, 0) and (0).
    target = Target({"a": torch.tensor([0.0, 4.0]), "b": torch.tensor([1.0])})
    gradient = [torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0]])]

    def value(objective: Objective) -> float:
        return float(objective([g.clone() for g in gradient], target).value)

    assert value(SquaredL2()) == pytest.approx(9)
    assert value(LayerL2()) == pytest.approx(3)
    assert value(LayerL2(relative=True)) == pytest.approx(0.75)
    assert value(Cosine()) == pytest.approx(1 - 17 / (26 * 17) ** 0.5)
    assert value(LayerCosine()) == pytest.approx((0.2 + 0) / 2)  # cos = 16 / 20 in the first
    assert value(Tag(0.1)) == pytest.approx(9 + 0.3)
    assert value(PositionCosine(SquaredL2(), "a", 2.0)) == pytest.approx(9 - 2 * 0.8)


def test_a_zero_or_broken_update_is_declined() -> None:
    with pytest.raises(AttackError, match="zero"):
        Target({"a": torch.zeros(3)})
    with pytest.raises(AttackError, match="finite"):
        Target({"a": torch.tensor([1.0, float("nan")])})
    with pytest.raises(AttackError, match="no layer"):
        Target({})


def test_the_position_term_needs_its_layer() -> None:
    target = Target({"a": torch.ones(2)})
    with pytest.raises(AttackError, match="position"):
        PositionCosine(SquaredL2(), "pos_embed", 1.0)([torch.ones(1, 2)], target)


def test_objectives_have_names_in_specs() -> None:
    assert objective_of("relative_l2") == LayerL2(relative=True)
    assert objective_of("cosine") == Cosine()
