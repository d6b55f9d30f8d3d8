"""Rounds: the table of what a run has done, from its sealed checkpoint.

``rounds.csv`` is for people, and has no seal: it is read only where there is no checkpoint that can
be, and held to what a table of rounds looks like.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from fedsim.core.errors import DamagedError
from fedsim.core.files import read_tensors
from fedsim.core.run.paths import CHECKPOINT, ROUND_COLUMNS, ROUNDS

if TYPE_CHECKING:
    import pandas as pd

_ROWS = TypeAdapter(list[dict[str, int | float | None]])


def rows_in(metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rounds that a checkpoint's metadata count; anything else is damage."""
    try:
        rows = _ROWS.validate_json(metadata["rounds"])
    except (KeyError, ValidationError) as error:
        raise DamagedError("its rounds are not what was written.") from error
    if [row.get("round") for row in rows] != list(range(1, len(rows) + 1)):
        raise DamagedError("its rounds are not numbered from 1.")
    return rows


def is_foreign(metadata: Mapping[str, str], spec: str | None) -> bool:
    """Whether a checkpoint says that it is of a run of another spec than the one of this digest;
    one from before it was named there says nothing."""
    return spec is not None and metadata.get("spec", spec) != spec


def as_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd  # when a table is asked for: it takes half a second

    return pd.DataFrame(rows, columns=list(ROUND_COLUMNS))


def read_rounds(root: Path, spec: str | None = None) -> pd.DataFrame:
    """The rounds of a run; FileNotFoundError where it has none, and damage is an error. Given the
    digest of its ``spec``, a checkpoint of another run is not read."""
    import pandas as pd

    try:
        metadata = read_tensors(root / CHECKPOINT)[1]
        if is_foreign(metadata, spec):
            raise DamagedError("it is of another run.")
        rows = rows_in(metadata)
    except (FileNotFoundError, DamagedError):
        return _from_csv(root / ROUNDS)
    return pd.read_csv(io.StringIO(as_table(rows).to_csv(index=False)))


def _from_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        table = pd.read_csv(path).reindex(columns=list(ROUND_COLUMNS))
        numbers = table.apply(pd.to_numeric)
    except FileNotFoundError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise DamagedError(f"'{path}' is damaged ({type(error).__name__}).") from error
    if numbers["round"].tolist() != list(range(1, len(numbers) + 1)):
        raise DamagedError(f"'{path}' is damaged: its rounds are not numbered from 1.")
    return numbers
