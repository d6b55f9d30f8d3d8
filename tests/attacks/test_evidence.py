"""Evidence: the formulas, against what they say in full."""

from __future__ import annotations

import math

import torch

from fedsim.attacks.evidence import RIDGE, Evidence, Explained, likelihood

COIN = torch.Generator().manual_seed(2)
REFERENCES = torch.randn(6, 40, generator=COIN)
UPDATES = torch.randn(2, 40, generator=COIN)
GRADIENT = torch.randn(40, generator=COIN)


def left(gradient: torch.Tensor, rows: torch.Tensor, ridge: float) -> torch.Tensor:
    """w = a - D^T (D D^T + ridge)^-1 D a, in full."""
    rows, gradient = rows.double(), gradient.double()
    weights = torch.linalg.solve(rows @ rows.T + ridge * torch.eye(len(rows)), rows @ gradient)
    return gradient - rows.T @ weights


def test_what_references_explain_is_left_out_of_a_gradient() -> None:
    ridge = RIDGE * float(REFERENCES.double().square().sum(1).mean())
    evidence = Explained(UPDATES, [REFERENCES]).beside(GRADIENT)
    rest = left(GRADIENT, REFERENCES, ridge)
    size = float(rest @ GRADIENT.double()) ** 0.5
    assert math.isclose(evidence.size, size, rel_tol=1e-5)
    told = UPDATES.double() @ rest / size / evidence.chance
    assert torch.allclose(evidence.told, told, rtol=1e-4)


def test_chance_is_what_each_reference_gets_that_is_left_out_of_the_others() -> None:
    explained = Explained(UPDATES, [REFERENCES])
    ridge = RIDGE * float(REFERENCES.double().square().sum(1).mean())
    own = []
    for row in range(len(REFERENCES)):
        others = torch.cat([REFERENCES[:row], REFERENCES[row + 1 :]])
        rest = left(REFERENCES[row], others, ridge)
        size = (float(rest @ REFERENCES[row].double()) + ridge) ** 0.5  # as [K^-1]_rr has it
        own.append(UPDATES.double() @ rest / size)
    chance = torch.stack(own).square().mean(0).sqrt()
    assert torch.allclose(explained.chance, chance, rtol=1e-4)


def test_references_that_come_later_count_as_if_they_had_been_there() -> None:
    whole = Explained(UPDATES, [REFERENCES]).beside(GRADIENT)
    parts = Explained(UPDATES, [REFERENCES[:4]]).with_more(REFERENCES[4:]).beside(GRADIENT)
    assert torch.allclose(whole.told, parts.told)
    assert math.isclose(whole.size, parts.size, rel_tol=1e-5)
    first = Explained(UPDATES, [REFERENCES])
    assert first.with_more(REFERENCES[:0]) is first


def test_a_member_stands_out_and_what_references_explain_does_not() -> None:
    members = torch.randn(4, 4000, generator=COIN)
    common = torch.randn(4000, generator=COIN) * 5
    references = common + torch.randn(20, 4000, generator=COIN)
    update = (members + common).mean(0)[None]
    explained = Explained(update, [references])
    inside = [float(explained.beside(one + common).told[0]) for one in members]
    outside = [
        float(explained.beside(common + torch.randn(4000, generator=COIN)).told[0])
        for _ in range(8)
    ]
    assert min(inside) > max(outside)


def test_an_update_is_as_large_as_it_is_whatever_noise_is_on_it() -> None:
    drawn = torch.randn(80, 3000, generator=COIN) * torch.logspace(0, -3, 3000)
    references, update = drawn[:64], 0.5 * drawn[64:].mean(0)
    noise = 0.02 * torch.randn(3000, generator=COIN)
    for one in (update, update + noise):
        assert 0.3 < Explained(one[None], [references]).scale(16) < 0.7
    assert Explained(-update[None], [references]).scale(16) > 0.3  # a direction is no size
    assert Explained(update[None], [references[:1]]).scale(16) == 1.0


def test_the_likelihood_ratio_is_that_of_two_normal_distributions() -> None:
    evidence = Evidence(torch.tensor([2.0]), torch.tensor([0.5]), size=3.0)
    apart = 0.25 * 3.0 / 0.5
    alone = likelihood(evidence, 0.25, torch.zeros(0))
    assert math.isclose(alone, apart * 2.0 - apart**2 / 2)
    likely = [-((2.0 - mean) ** 2) / 2 for mean in (apart, 0.0)]
    assert math.isclose(alone, likely[0] - likely[1])


def test_what_every_update_says_of_a_picture_counts_for_less() -> None:
    evidence = Evidence(torch.tensor([2.0]), torch.tensor([1.0]), size=1.0)
    usual = likelihood(evidence, 1.0, torch.full((9,), 2.0))
    unusual = likelihood(evidence, 1.0, torch.zeros(9))
    assert usual < unusual
