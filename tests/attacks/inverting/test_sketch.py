"""Sketches: vectors of fixed size, in which small tensors are whole and large ones hashed."""

from __future__ import annotations

import math

import pytest
import torch

from fedsim.attacks.inverting.sketch import Sketch
from fedsim.core.errors import AttackError
from fedsim.core.learning import Update
from fedsim.core.spec import Upload


def update(seed: int = 0, scale: float = 1.0, **changed: torch.Tensor) -> Update:
    coin = torch.Generator().manual_seed(seed)
    tensors = {
        "large": torch.randn(40, 25, generator=coin) * scale,
        "middle": torch.randn(100, generator=coin),
        "small": torch.randn(7, generator=coin),
    }
    buffers = {"bn.mean": torch.ones(3), "bn.count": torch.tensor(4)}
    return Update(Upload.GRADIENT, tensors | changed, buffers)


def test_small_tensors_are_whole_and_large_ones_share_what_is_left() -> None:
    sketch = Sketch.of(update(), 150, seed=1)
    vector = sketch(update())
    assert sketch.most == 70  # 70 + 70 + 7 + 3 entries
    assert len(vector) == sketch.length == 150 + 4  # and a scale for each tensor
    small = update().tensors["small"]
    assert torch.allclose(vector[140:147], small / small.square().mean().sqrt())


def test_a_sum_of_a_hashed_tensor_is_that_of_its_signed_numbers() -> None:
    sketch = Sketch.of(update(), 150, seed=1)
    values = update().tensors["large"].flatten()
    values = values / values.square().mean().sqrt()
    one = torch.zeros(1000)
    one[123] = 1
    place = int(sketch._hashed("large", one).abs().argmax())
    shared = [at for at in range(1000) if sketch._hashed("large", torch.eye(1000)[at])[place] != 0]
    assert 1000 // 70 <= len(shared) <= 1000 // 70 + 1
    signs = [float(sketch._hashed("large", torch.eye(1000)[at])[place]) for at in shared]
    expected = sum(sign * values[at] for sign, at in zip(signs, shared, strict=True))
    assert float(sketch(update())[place]) == pytest.approx(float(expected), abs=1e-4)
    assert set(signs) == {-1.0, 1.0}


def test_only_the_scale_of_a_tensor_tells_how_large_it_is() -> None:
    sketch = Sketch.of(update(), 150, seed=1)
    once, tenfold = sketch(update()), sketch(update(scale=10.0))
    assert torch.allclose(once[:150], tenfold[:150], atol=1e-4)
    assert float(tenfold[150] - once[150]) == pytest.approx(math.log(10), abs=1e-4)


def test_the_same_seed_the_same_hash() -> None:
    one, two, other = (Sketch.of(update(), 150, seed=s)(update(5)) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)


def test_what_is_missing_is_taken_for_zeros_and_told() -> None:
    sketch = Sketch.of(update(), 150, seed=1)
    part = Update(Upload.GRADIENT, {"large": update().tensors["large"]})
    assert sketch.lacking(part) == ["buffer bn.mean", "middle", "small"]
    assert torch.equal(sketch(part)[70:147], torch.zeros(77))
    assert bool(torch.isfinite(sketch(part).half()).all())


def test_another_shape_and_a_masked_upload_are_declined() -> None:
    sketch = Sketch.of(update(), 150, seed=1)
    with pytest.raises(AttackError, match="'small' has 8 numbers where simulated clients have 7"):
        sketch(update(small=torch.ones(8)))
    with pytest.raises(AttackError, match="masked"):
        sketch(update(small=torch.ones(7, dtype=torch.long)))
