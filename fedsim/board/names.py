"""Names that somebody else chose: short, of letters and digits, and nothing that a page, a path or
a terminal would take for more than a name."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from fedsim.core.errors import RunError
from fedsim.core.text import brief

_NAME = re.compile(r"\w[\w .,'+-]{0,79}")
MOST_LINK = 200
_LINK = re.compile(r"[!#-&(-;=?-\[\]_a-z~]+")  # printable ASCII that ends no attribute


def checked_name(name: str, what: str = "the name") -> str:
    """The name, or why it is none."""
    if _NAME.fullmatch(name) is None or name.strip() != name or ".." in name:
        raise RunError(
            f"{what} {brief(name)} is not one of up to 80 letters, digits, spaces and . , ' + - _ "
            f"that begins with a letter or digit."
        )
    return name


def checked_link(link: str | None) -> str | None:
    """The link, which leads to a page and nowhere else, or why it does not."""
    if link is None:
        return None
    try:
        parts = urlsplit(link)
        leads = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username
        parts.port  # noqa: B018 - raises where it is none
    except ValueError:
        leads = False
    if not leads or len(link) > MOST_LINK or _LINK.fullmatch(link) is None:
        raise RunError(
            f"the link {brief(link)} is not the address of a page: give one of up to {MOST_LINK} "
            f"characters that begins with https:// or http://."
        )
    return link
