"""LPIPS: its authors' numbers, or a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fedsim.core import metrics
from tests.core.metrics.conftest import A


def test_lpips_is_empty_with_a_reason_where_its_weights_are_not_to_be_had(
    no_weights: None,
) -> None:
    assert metrics.lpips(A, A) is None
    assert "fedsim weights fetch" in str(metrics.lpips_unavailable())


REFERENCES = Path(__file__).parents[4] / "shared" / "data" / "lpips_ref"


def picture(path: Path) -> torch.Tensor:
    pixels = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


@pytest.mark.skipif(not REFERENCES.is_dir(), reason="the reference pictures are not here")
def test_lpips_gives_its_authors_numbers(real_weights: None) -> None:
    files = {name: next(REFERENCES.glob(f"*{name}*")) for name in ("ref", "p0", "p1")}
    ref = picture(files["ref"])
    for name, expected in (("p0", 0.7219), ("p1", 0.1376)):
        found = metrics.lpips(ref, picture(files[name]))
        assert found is not None
        assert float(found) == pytest.approx(expected, abs=5e-5)


def test_lpips_of_a_batch_is_that_of_its_pairs_and_zero_for_equals(real_weights: None) -> None:
    coin = torch.Generator().manual_seed(3)
    a, b = torch.rand(2, 18, 3, 32, 32, generator=coin)  # more than are held at once
    batch, alone = metrics.lpips(a, b), metrics.lpips(a[5:6], b[5:6])
    assert batch is not None
    assert alone is not None
    assert float(batch[5]) == pytest.approx(float(alone), abs=1e-5)
    same = metrics.lpips(a, a)
    assert same is not None
    assert float(same.max()) == pytest.approx(0, abs=1e-6)
    small = [x[..., :25, :25] for x in (a, b)]
    large = [F.interpolate(x, size=32, mode="bilinear", antialias=False) for x in small]
    enlarged = metrics.lpips(*small)
    assert enlarged is not None
    assert torch.allclose(enlarged, metrics.lpips(*large), atol=1e-4)
