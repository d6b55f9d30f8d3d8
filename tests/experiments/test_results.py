"""The papers' claims in RESULTS: what is counted is what the table says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def verdicts() -> list[str]:
    """The first word of every claim's verdict."""
    _, _, table = (ROOT / "experiments" / "RESULTS.md").read_text().partition("| claim |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [re.split(r"[ :;,]", row.split("|")[3].strip())[0] for row in rows]


def test_the_claims_that_are_counted_are_those_of_the_table() -> None:
    told = Counter(verdicts())
    assert set(told) == {"holds", "fails", "undecided"}
    sums = (len(verdicts()), told["holds"], told["fails"], told["undecided"])
    counted = r"(\d+) (?:claims|so far) (\d+) hold,.* (\d+) fails and (\d+) are undecided"
    for page in ("experiments/RESULTS.md", "README.md"):
        text = " ".join((ROOT / page).read_text().split())
        found = re.search(counted, text)
        assert found is not None, page
        assert tuple(map(int, found.groups())) == sums, page
