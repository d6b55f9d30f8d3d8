"""Trouble: whatever goes wrong on our side is a warning, and never the training's."""

from __future__ import annotations

import contextlib
import threading
import warnings


class CaptureWarning(UserWarning):
    """Something that fedsim could not keep of an app; the app goes on."""


_TOLD: set[str] = set()
_TELLING = threading.Lock()


def warn(words: str, *, again: bool = True) -> None:
    """A Python warning of one sentence; with ``again`` False, once in a process."""
    with _TELLING:
        if not again and words in _TOLD:
            return
        _TOLD.add(words)
    with contextlib.suppress(Exception):  # where warnings are made errors, they are not ours
        warnings.warn(f"fedsim: {words}", CaptureWarning, stacklevel=3)


def reason(error: BaseException) -> str:
    """An error as the end of a sentence."""
    words = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    name = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        words = error.strerror
    return f"{words} ({name})" if words else name
