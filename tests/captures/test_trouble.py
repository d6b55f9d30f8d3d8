"""Trouble is a warning and nothing else."""

from __future__ import annotations

import errno
import warnings

import pytest

from fedsim.captures.trouble import CaptureWarning, reason, warn


def test_a_warning_never_raises() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn("this would be an error") is None  # type: ignore[func-returns-value]
    with pytest.warns(CaptureWarning, match="fedsim: this is told"):
        warn("this is told")


def test_an_error_is_the_end_of_a_sentence() -> None:
    assert reason(ValueError("it is odd.\nAnd more")) == "it is odd (ValueError)"
    assert reason(OSError(errno.ENOSPC, "No space left")) == "No space left (OSError)"
    assert reason(KeyError()) == "KeyError"
