"""Checkout: the commit of fedsim itself, where it is run from its own repository.

A number is worth as much as the code that measured it, and between two releases the version alone
does not tell which that was.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 10.0  # seconds


@functools.cache
def commit_of(root: Path = ROOT) -> str | None:
    """The commit, with ``-dirty`` where files differ from it; None for an installed package, which
    may lie inside a repository of its user's."""
    if not (root / ".git").exists():
        return None
    words = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        told = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a repository that it does not trust
        return None
    return told.stdout.strip() or None
