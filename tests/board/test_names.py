"""Names and links of others: what a page, a path or a terminal would take for more is refused."""

from __future__ import annotations

import pytest

from fedsim.board.names import checked_link, checked_name
from fedsim.core.errors import RunError


@pytest.mark.parametrize("name", ["Zoë O'Neill", "team_7", "A. B. Clark-Jones", "3", "x" * 80])
def test_names_of_people_are_names(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "<b>me</b>", "me & you", 'a"b', "../up", "a/b", "a\\b", ".hidden", "a..b"),
        *("-o", "=1+1", "a\nb", "a\x1b[31m", "x" * 81, " me", "me ", "a\u202eb", "{{ 1 }}"),
    ],
)
def test_what_is_more_than_a_name_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(RunError, match="is not one of up to 80 letters") as refusal:
        checked_name(name)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("link", ["https://a.org/b?c=d#e", "http://a.org:80/~me", None])
def test_links_to_pages_are_links(link: str | None) -> None:
    assert checked_link(link) == link


@pytest.mark.parametrize(
    "link",
    [
        *("javascript:alert(1)", "data:text/html,x", "file:///etc/passwd", "//a.org", "a.org"),
        *("https://", 'https://a.org/"x', "https://a.org/<x>", "https://a.org/ x", "ftp://a.org"),
        *(
            "https://me@a.org",
            "https://a.org:port",
            "https://a.org/'",
            "https://a.org/" + 200 * "x",
        ),
        "JAVASCRIPT://a.org/%0aalert(1)",
    ],
)
def test_what_leads_elsewhere_is_refused_in_a_sentence(link: str) -> None:
    with pytest.raises(RunError, match="is not the address of a page"):
        checked_link(link)
