"""The commands for a Ray that stays up: what they tell where there is none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from fedsim.cluster.local import Cluster
from fedsim.cluster.processes import Child
from fedsim.core.files import write_json


def test_without_a_cluster_the_status_says_so(run_cli, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    code, out, _ = run_cli("cluster", "status", "--state", state)
    assert (code, out.strip()) == (0, "no cluster was started here")
    code, out, _ = run_cli("cluster", "status", "--state", state, "--json")
    assert json.loads(out) == {"address": None, "nodes": []}


def test_a_cluster_whose_nodes_died_is_told_and_ended(run_cli, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    dead = Child(os.getpid(), 1.0)  # the number is another's by now
    write_json(state, asdict(Cluster("127.0.0.1:1", str(tmp_path / "ray"), (dead,))))
    code, out, _ = run_cli("cluster", "status", "--state", state)
    assert (code, out.strip()) == (0, "127.0.0.1:1: 0 of 1 nodes run")
    code, out, _ = run_cli("cluster", "down", "--state", state)
    assert code == 0
    assert not state.exists()
