"""All fuzzers in turn, and how many inputs they met."""

from __future__ import annotations

import json

import pytest

from fedsim.core.run import Run
from tests.fuzz import test_commands, test_files, test_pages, test_specs
from tests.fuzz.inputs import altered
from tests.fuzz.meeting import Loaders, fuzz

MANY = {test_specs: 600, test_files: 450, test_pages: 250, test_commands: 400}  # a loader


@pytest.mark.slow
def test_ten_thousand_specs_and_files_end_in_a_value_or_a_sentence(run: Run) -> None:
    good = json.loads(test_files.observation_of(run).read_text())
    tree: Loaders = {"observation tree": (altered(good), test_files.observation_tree)}
    counts = {"observation tree": fuzz(tree, "observation tree", 600, run)}
    for module, examples in MANY.items():
        for loader in module.FUZZED:
            counts[loader] = fuzz(module.FUZZED, loader, examples, run)
    print(counts)
    assert sum(counts.values()) >= 10_000
