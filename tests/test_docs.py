"""The documents: what they name exists, and they are wrapped at one width."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = re.compile(r"`(fedsim(?:\.\w+)+)(?:\(.*?\))?`")
WHOLE = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)")  # what is not broken over lines
WIDTH = 100
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
APPS = [ROOT / "experiments" / "flower_app" / "README.md"]
FILE = re.compile(r"`((?:fedsim|attacks|defenses|clients|tests|experiments|docs)/[\w./]*\w/?)`")


def resolved(name: str) -> object:
    """What a dotted name stands for: a module, or what is in one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[depth:]:
            found = getattr(found, attribute)
        return found
    raise AttributeError(name)


def prose(text: str) -> list[str]:
    """The lines that could be wrapped: no code, no tables, no pictures, no single long word."""
    lines = re.sub(r"(?ms)^```.*?^```$", "", text).splitlines()
    return [
        line
        for line in lines
        if not line.startswith(("|", "!", "    "))
        and re.search(r"\s", WHOLE.sub("x", line.strip("- ")))
    ]


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "experiments" / "RESULTS.md", *APPS], ids=lambda p: p.name
)
def test_prose_is_wrapped_at_one_width(page: Path) -> None:
    assert [line for line in prose(page.read_text()) if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_everything_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in sorted(set(NAME.findall(text))):
        assert resolved(name) is not None, f"{page.name} names {name}"
    for file in sorted(set(FILE.findall(text))):
        assert (ROOT / file).exists(), f"{page.name} names {file}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "experiments" / "RESULTS.md", *APPS], ids=lambda p: p.name
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(re.sub(r"(?ms)^```.*?^```$", "", page.read_text())):
        file, _, heading = target.partition("#")
        there = (page.parent / file) if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in headings(there), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """The anchors of a page, as they are made of its headings."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    names = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in names}


def test_the_way_of_an_update_names_its_functions() -> None:
    names = set(NAME.findall((ROOT / "docs" / "architecture.md").read_text()))
    assert len(names) > 30
    with pytest.raises(AttributeError):
        resolved("fedsim.core.learning.forget")
