"""The run index: runs and benches found under directories."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedsim.viewer.app import create_app
from fedsim.viewer.run_index import RunIndex, short_names
from tests.viewing import TOKEN, look


def test_runs_are_found_in_folders_and_benches_but_not_in_runs(shelf: Path) -> None:
    bench = shelf / "grid"
    for cell in ("cells/none", "utility/none", "cells/clip"):
        (bench / cell).mkdir(parents=True)
        shutil.copy(shelf / "done" / "spec.yaml", bench / cell / "spec.yaml")
    (bench / "bench.json").write_text("{}")
    (bench / "report.html").write_text("<p>the frontier</p>")
    (shelf / "done" / "vault" / "spec.yaml").write_text("{}")
    groups = RunIndex([shelf, shelf / "done"]).groups()
    found = {g.name: [run.name for run in g.runs] for g in groups}
    assert found == {"grid": ["clip", "cells/none", "utility/none"], "runs": ["done"]}
    app, keys = create_app([shelf], TOKEN), {g.name: g.key for g in groups}
    assert "the frontier" in look(app, f"/benches/{keys['grid']}/report").text
    assert f"/benches/{keys['grid']}/report" in look(app, "/").text
    assert look(app, f"/benches/{keys['runs']}/report").status_code == 404


def test_names_are_as_short_as_they_can_be() -> None:
    paths = [Path("/a/x/run"), Path("/a/y/run"), Path("/a/other")]
    assert list(short_names(paths).values()) == ["x/run", "y/run", "other"]
