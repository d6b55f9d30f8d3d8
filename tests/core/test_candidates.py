"""Candidates: who is handed them, and what may not come back from whoever was."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.attack import Reconstruction
from fedsim.core.candidates import CANDIDATES, Candidates, refuse_other_claims, shown_to
from fedsim.core.errors import AttackError

LIST = Candidates(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 1]))
NO_PICTURE = torch.zeros(0, 3, 8, 8)


def test_the_field_is_granted_to_whoever_was_handed_a_list_and_to_nobody_else() -> None:
    granted = frozenset({"update", CANDIDATES})
    assert shown_to(granted, LIST) == granted
    assert shown_to(granted, None) == {"update"}


def test_a_number_for_each_candidate_is_all_that_may_come_back() -> None:
    refuse_other_claims(Reconstruction(NO_PICTURE, membership=torch.rand(3, 2)), LIST)
    assert len(LIST) == 3
    claims = {
        "images": {"images": LIST.images[:1]},
        "labels": {"labels": LIST.labels[:1]},
        "features": {"features": torch.rand(1, 4)},
        "a film": {"film": {1: LIST.images[:1]}},
    }
    for what, claim in claims.items():
        told = {"images": NO_PICTURE, "membership": torch.rand(3, 2), **claim}
        with pytest.raises(AttackError, match=f"returned {what}, and was handed candidates"):
            refuse_other_claims(Reconstruction(**told), LIST)


def test_something_is_said_of_each_candidate_or_of_none() -> None:
    with pytest.raises(AttackError, match="told 2 candidates of 3"):
        refuse_other_claims(Reconstruction(NO_PICTURE, membership=torch.rand(2, 1)), LIST)
    with pytest.raises(AttackError, match="told 0 candidates of 3"):
        refuse_other_claims(Reconstruction(NO_PICTURE), LIST)
    with pytest.raises(AttackError, match="was handed no list"):
        refuse_other_claims(Reconstruction(NO_PICTURE, membership=torch.rand(3, 1)), None)
    refuse_other_claims(Reconstruction(LIST.images), None)
