"""Errors: the nearest right word."""

from __future__ import annotations

import pytest

from fedsim.core import errors
from fedsim.core.errors import FedsimError, did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "told"),
    [
        ("rouns", ["rounds", "lr"], " (did you mean 'rounds'?)"),
        ("rounds", {"rounds": 1}, " (did you mean 'rounds'?)"),
        ("xyz", ["rounds", "lr"], ""),
        ("xyz", [], ""),
    ],
)
def test_the_nearest_word_is_asked_for_where_one_is_near(word: str, known, told: str) -> None:
    assert did_you_mean(word, known) == told


def test_every_error_of_ours_is_one_that_the_command_line_tells_without_a_traceback() -> None:
    ours = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(ours) > 5
    assert all(issubclass(error, FedsimError) for error in ours)
    assert all(error("words").exit_code in (1, 2) for error in ours)
