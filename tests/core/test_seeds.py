"""Seeds from text: the numbers that runs on disk were made with."""

from __future__ import annotations

import hashlib

from fedsim.core.seeds import seed_from


def test_a_seed_is_the_beginning_of_the_hash() -> None:
    digest = hashlib.sha256(b"client 1 round 2 seed 0").hexdigest()
    assert seed_from("client 1 round 2 seed 0") == int(digest[:12], 16)
    assert seed_from("client 1 round 2 seed 0", size=7) == int(digest[:14], 16)


def test_seeds_are_those_of_earlier_versions() -> None:
    assert seed_from("0 patch_solve 1 0 0") == 11377521434748
