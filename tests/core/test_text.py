"""Text from elsewhere: what may be written down, and what a terminal may be shown."""

from __future__ import annotations

import os

import pytest

from fedsim.core.errors import RunError
from fedsim.core.text import brief, encoded, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcödé, 日本", "plain, ünïcödé, 日本"),
        (os.fsdecode(b"photo-\xff\xe9.png"), r"photo-\xff\xe9.png"),
        ("half \ud83d of a pair", "half \N{REPLACEMENT CHARACTER} of a pair"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("over\rwritten \x9b", r"over\x0dwritten \x9b"),
    ],
)
def test_what_cannot_be_shown_is_shown_by_its_number(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()


def test_a_page_is_encoded_whatever_is_in_it() -> None:
    assert encoded("é\n\r\udcff\ud800") == "é\n\r\\xff\N{REPLACEMENT CHARACTER}".encode()


def test_an_error_is_one_line_that_any_terminal_takes() -> None:
    error = RunError(f"'{os.fsdecode(b'a-dir/x[')}' \n is\x1b[2J gone: \ud800.")
    assert str(error) == "'a-dir/x[' is\\x1b[2J gone: \N{REPLACEMENT CHARACTER}."


def test_a_value_is_quoted_briefly_however_large_it_is() -> None:
    assert brief("x") == "'x'"
    assert len(brief("x" * 10_000)) < 100
    assert brief(10**5000) == "a very large int"
