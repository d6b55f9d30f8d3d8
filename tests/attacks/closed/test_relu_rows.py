"""ReLU rows: zeros, sides and scale of a tiny layer, by its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.attacks.closed.relu_rows import Layer, plane
from fedsim.attacks.closed.sparse import ColumnSpace

UNITS, PIXELS, BATCH = 60, 12, 3


def tiny(batch: int = BATCH) -> tuple[Layer, Tensor, Tensor, list[Tensor]]:
    """A layer, its D, the rows (x, 1) that it read, and the directions of D's columns."""
    coin = torch.Generator().manual_seed(0)
    weight = torch.randn(UNITS, PIXELS + 1, generator=coin, dtype=torch.float64)
    x = torch.randn(batch, PIXELS, generator=coin, dtype=torch.float64)
    rows = torch.cat([x, torch.ones(batch, 1, dtype=torch.float64)], 1)
    d = torch.randn(UNITS, batch, generator=coin, dtype=torch.float64) * (weight @ rows.T > 0)
    layer = Layer(ColumnSpace.of(d @ rows, batch), weight)
    q = torch.linalg.lstsq(layer.space.left, d).solution
    return layer, d, rows, [column / column.norm() for column in q.T]


def test_a_column_is_believed_and_turned_the_right_way() -> None:
    layer, _, _, directions = tiny()
    for q in directions:
        judged = layer.judge(-q)
        assert judged is not None
        assert torch.equal(judged.q, q)
        others = [other for other in directions if other is not q]
        assert all(abs(float(judged.row @ other)) < 0.3 for other in others)


def test_a_mixture_is_not_believed() -> None:
    layer, d, _, directions = tiny()
    q = directions[0] / (d[:, 0].norm()) + directions[1]
    assert layer.judge(q) is None


def test_the_bias_sets_the_scale() -> None:
    layer, _, rows, directions = tiny()
    assert torch.allclose(layer.pictures(directions), rows, atol=1e-9)
    assert torch.allclose(layer.pictures(directions[::-1]), rows.flip(0), atol=1e-9)


def test_the_zeros_that_pictures_imply_take_out_what_is_wrong_with_a_direction() -> None:
    layer, _, rows, directions = tiny()
    coin = torch.Generator().manual_seed(1)
    rough = [q + 1e-4 * torch.randn(q.shape, generator=coin, dtype=q.dtype) for q in directions]
    assert float((layer.pictures(rough) - rows).abs().max()) > 1e-5
    assert torch.allclose(layer.pictures(layer.polished(rough)), rows, atol=1e-9)


def test_what_true_pictures_imply_explains_the_gradient_and_wrong_ones_do_not() -> None:
    layer, d, rows, _ = tiny()
    columns, misfit = layer.explained(rows)
    assert torch.allclose(columns, d, atol=1e-9)
    assert misfit < 1e-9
    assert layer.explained(rows[:2])[1] > 0.1
    wrong = rows.clone()
    wrong[0, :PIXELS] = -wrong[0, :PIXELS]
    assert layer.explained(wrong)[1] > 0.1


def test_what_one_missing_column_leaves_open_is_set_by_the_sides_of_the_units() -> None:
    layer, _, rows, directions = tiny()
    known = layer.pictures(directions[:2])
    apart = (known - rows[:2]).norm(dim=1) / rows[:2].norm(dim=1)
    assert float(apart.max()) < 0.2
    assert torch.equal(known @ layer.weight.T > 0, rows[:2] @ layer.weight.T > 0)


def test_one_picture_is_the_quotient_of_weight_and_bias() -> None:
    layer, _, rows, directions = tiny(batch=1)
    assert torch.allclose(layer.pictures(directions), rows, atol=1e-9)


@pytest.mark.parametrize("turned", [1.0, -1.0])
def test_a_plane_is_found_where_there_is_one(turned: float) -> None:
    coin = torch.Generator().manual_seed(0)
    points = torch.randn(200, 5, generator=coin, dtype=torch.float64)
    normal = torch.randn(5, generator=coin, dtype=torch.float64)
    found, share = plane(points, turned * (points @ normal) > 0)
    assert share == 1
    assert float(torch.cosine_similarity(found, turned * normal, dim=0)) > 0.99
    _, share = plane(points, torch.rand(200, generator=coin) < 0.5)
    assert share < 0.7
