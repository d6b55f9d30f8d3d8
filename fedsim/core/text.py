r"""Text from elsewhere: names of files in any encoding, words of clients, what a file says.

Python keeps it as it came. Bytes of a name that are no UTF-8 become lone surrogates, which no file
and no page can hold, and a control character means something to a terminal. Both are shown by their
number instead, as ``\xff`` and ``\x1b``.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but tab and line feed
_ESCAPED = range(0xDC80, 0xDD00)  # how Python keeps the bytes from 0x80 on


def encoded(text: str) -> bytes:
    """UTF-8 for a file or a page, whatever the text holds."""
    return _SURROGATE.sub(_by_number, text).encode()


def visible(text: str) -> str:
    """The text with nothing in it that a terminal would obey or that cannot be written down."""
    return _UNSHOWN.sub(_by_number, text)


def brief(value: object) -> str:
    """A value in a few characters, for a sentence that quotes it."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of more digits than Python writes down
        return f"a very large {type(value).__name__}"


def listed(words: Sequence[str], most: int = 6) -> str:
    """Words one after the other, the first few of many."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def _by_number(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number in _ESCAPED:
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else "\N{REPLACEMENT CHARACTER}"


def in_brief(strength: Mapping[str, Any]) -> str:
    """A strength in a word or two: its numbers."""
    parts = []
    for key, value in strength.items():
        if value is True:
            parts.append(key)
        elif isinstance(value, list):
            parts.append("+".join(map(str, value)))
        else:
            parts.append(f"{key} {value}")
    return " ".join(parts)
