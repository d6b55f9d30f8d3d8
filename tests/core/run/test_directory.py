"""A run: what its directory gives back, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.campaign.plan import victims
from fedsim.core.errors import RunError
from fedsim.core.run import Run


def test_images_are_what_the_attack_returned(small_run: Run) -> None:
    round_, client = victims(small_run.spec)[0]
    images = small_run.images("patch_solve", round_, client)
    assert tuple(images.shape) == (1, 3, 32, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    with pytest.raises(RunError, match="no reconstruction by nobody"):
        small_run.images("nobody", round_, client)


def test_a_notebook_shows_the_verdicts(small_run: Run, tmp_path: Path) -> None:
    page = small_run._repr_html_()
    assert "<b>LEAKS</b>" in page
    assert str(small_run.report) in page
    assert "not finished" in Run(tmp_path)._repr_html_()
    assert repr(small_run) == f"Run('{small_run.root}')"
