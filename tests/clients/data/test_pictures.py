"""Pictures to tensors: their centre, three channels, 8 bits where they have no more."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.clients.data.pictures import DAMAGED, FORMATS, decode, opened, packed, unpacked
from fedsim.core.spec import DataSpec
from tests.layouts import load


def test_packing_a_picture_gives_it_back() -> None:
    grid = torch.arange(256).float().repeat(12).view(3, 32, 32) / 255.0
    assert torch.equal(unpacked(packed(grid)), grid)


def test_a_wide_picture_gives_its_centre_square(tmp_path: Path) -> None:
    stripes = np.zeros((40, 120, 3), dtype=np.uint8)
    stripes[:, 40:80] = (255, 0, 0)
    for name in ("a", "b"):
        (tmp_path / "wide" / name).mkdir(parents=True)
        Image.fromarray(stripes).save(tmp_path / "wide" / name / "wide.png")
    image = load("imagefolder", tmp_path / "wide", image_size=20).image(0)
    assert torch.equal(image, torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 20, 20))


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_picture_becomes_three_channels(tmp_path: Path, mode: str) -> None:
    ramp = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1)))
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(ramp).astype(np.uint16) * 257)
    else:
        picture = ramp.convert("RGB").convert(mode)
    for name in ("a", "b"):
        (tmp_path / "kinds" / name).mkdir(parents=True)
        picture.save(tmp_path / "kinds" / name / "ramp.tif")
    images = load("imagefolder", tmp_path / "kinds", image_size=64)
    assert images.skipped == ()
    image = images.image(0)
    assert image.shape == (3, 64, 64)
    assert image[:, :, :16].mean() < 0.3 < 0.7 < image[:, :, 48:].mean()


def test_a_picture_is_decoded_once_and_comes_back_the_same() -> None:
    from fedsim.clients.data.photos import Photos
    from fedsim.clients.data.pictures import Remembered

    class Counting(Photos):
        asked = 0

        def image(self, index: int) -> torch.Tensor:
            self.asked += 1
            return super().image(index)

    source = Counting(DataSpec(image_size=32), "test")
    one = source.image(0)
    kept = Remembered(source, limit=2 * one.numel())  # a byte a number: room for two
    seen = [[kept.image(i) for i in (0, 1, 2)] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert torch.equal(seen[1][0], one)
    assert source.asked == 1 + 3 + 1  # the third did not fit
    seen[1][0].zero_()
    assert torch.equal(kept.image(0), one)  # what is handed out is the caller's own


def header_of(width: int, height: int) -> bytes:
    """A PNG of this size, of which only the beginning is there."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    check = struct.pack(">I", zlib.crc32(header))
    begun = struct.pack(">I", 1000) + b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + check + begun


@pytest.mark.parametrize("side", [9_500, 12_000, 100_000])
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_unpacked(
    side: int,
) -> None:
    with pytest.raises(Image.DecompressionBombError):
        decode(header_of(side, side))
    assert Image.DecompressionBombError in DAMAGED


def test_nothing_that_would_start_a_program_is_opened() -> None:
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    with Image.open(io.BytesIO(postscript)) as picture:
        assert picture.format == "EPS"  # Pillow would
    with pytest.raises(OSError, match="cannot identify image file"):
        opened(io.BytesIO(postscript))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_kind_of_picture_is_decoded(kind: str) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "white").save(stream, kind)
    assert decode(stream.getvalue()).getpixel((4, 4)) == (255, 255, 255)
