"""The documents: what they name exists, and they are wrapped at one width."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = re.compile(r"`(fedsim(?:\.\w+)+)(?:\(.*?\))?`")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_everything_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in sorted(set(NAME.findall(text))):
        assert resolved(name) is not None, f"{page.name} names {name}"
    for file in sorted(set(FILE.findall(text))):
        assert (ROOT / file).exists(), f"{page.name} names {file}"


def test_the_way_of_an_update_names_its_functions() -> None:
    names = set(NAME.findall((ROOT / "docs" / "architecture.md").read_text()))
    assert len(names) > 30
    with pytest.raises(AttributeError):
        resolved("fedsim.core.learning.forget")
