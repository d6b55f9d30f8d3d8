"""The benchmark: attacks x defenses x strengths x seeds, what each costs and what it buys.

`cells` is what a bench spec asks for, `measurement` does it, `table` says what came out, `report`
shows it.
"""

from __future__ import annotations

from fedsim.bench.cells import Bench, Cell, load_bench
from fedsim.bench.measurement import conduct
from fedsim.bench.table import by_cell

__all__ = ["Bench", "Cell", "by_cell", "conduct", "load_bench"]
