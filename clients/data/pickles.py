"""Pickles: data sets that come as such, read without running what a file may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim.core.errors import DataError
from fedsim.core.unpickling import Refused, load_arrays


def read_pickle(file: Path, what: str) -> dict[str, Any]:
    """A dictionary with text keys; its arrays are `Array`. ``what``: for messages."""
    try:
        content = load_arrays(file.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{file} is missing; get {what}'s python version anew.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except Refused as error:
        raise DataError(
            f"{file} asks to load '{error}', which no {what} batch needs; do not trust this file."
        ) from error
    # Garbled bytes make the unpickler raise almost anything, as its documentation says.
    except Exception as error:
        raise DataError(f"{file} is damaged; get {what}'s python version anew.") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a {what} batch; get {what}'s python version anew.")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in content.items()}
