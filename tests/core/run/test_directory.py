"""A run: what its directory gives back, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.campaign.plan import victims
from fedsim.core.errors import RunError
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec


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


def test_a_run_from_before_a_path_was_made_absolute_still_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"threat": {"model": "D", "prior": {"checkpoint": "prior.pth"}}}
    before = Spec.model_validate(content)
    run = Run.create(tmp_path / "run", before)
    assert load_spec(content).digest() != before.digest()
    assert Run.open(run.root).spec == load_spec(content)
    Run.create(run.root, load_spec(content))  # the same one again
    with pytest.raises(RunError, match="holds a run of another spec"):
        Run.create(run.root, load_spec(content, ["seed=1"]))
    (run.root / "spec.yaml").write_text("seed: 1")
    with pytest.raises(RunError, match="not the one that the run began with"):
        Run.open(run.root)
