"""The sparse vector technique as FLARE has it: what is drawn, noised and cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.core.defense import Exposure, Informed
from fedsim.core.errors import FedsimError
from fedsim.core.learning import Trail, Update
from fedsim.core.spec import Upload
from fedsim.defenses.svt_privacy import SvtPrivacy
from tests.defenses.conftest import MODELS, Defended, assert_canary_holds, secret


def numbers(count: int = 10_000, scale: float = 0.1) -> Update:
    return Update(Upload.DELTA, {"w": scale * torch.randn(count, generator=secret())})


def uploaded(defense: SvtPrivacy, update: Update) -> torch.Tensor:
    return defense.protect_update(update, secret(1)).tensors["w"]


def test_a_fraction_is_uploaded_and_none_of_it_beyond_the_limit() -> None:
    held = uploaded(SvtPrivacy(fraction=0.2, replacement=False), numbers())
    assert int((held != 0).sum()) == 2000
    assert float(held.abs().max()) == pytest.approx(1e-5)
    fewer = uploaded(SvtPrivacy(fraction=0.2), numbers())
    assert 1500 < int((fewer != 0).sum()) < 2000  # drawn with replacement


def test_without_noise_to_speak_of_the_largest_numbers_are_taken_as_they_are() -> None:
    update = Update(Upload.DELTA, {"w": torch.tensor([0.5, -0.001, 0.002, -0.4, 0.3])})
    quiet = SvtPrivacy(
        fraction=0.6, epsilon=1e9, noise_var=1e9, gamma=1.0, tau=0.1, replacement=False
    )
    wanted = torch.tensor([0.5, 0.0, 0.0, -0.4, 0.3])
    assert torch.allclose(uploaded(quiet, update), wanted, atol=1e-4)


def test_what_was_accepted_and_not_drawn_was_once_uploaded_raw() -> None:
    update = numbers()
    held = uploaded(SvtPrivacy(undrawn="raw"), update)
    raw = held == update.tensors["w"]
    assert 0.2 < float(raw.float().mean()) < 0.7
    assert not (uploaded(SvtPrivacy(), update) == update.tensors["w"]).any()


def test_a_server_keeps_the_raw_numbers_alone() -> None:
    update, defense = numbers(), SvtPrivacy(undrawn="raw")
    seen = defense.protect_update(update, secret(1))
    informed = defense.counter(Informed(seen), torch.nn.Identity())
    left = informed.update.tensors["w"]
    assert informed.masked
    assert bool((left[left != 0] == update.tensors["w"][left != 0]).all())
    assert float((left != 0).float().mean()) > 0.2
    assert "were uploaded raw" in informed.notes[0]


def test_what_has_no_dimension_stays_and_the_order_of_tensors_too() -> None:
    update = Update(Upload.DELTA, {"z": torch.tensor(3.0), "a": torch.ones(50)})
    held = SvtPrivacy().protect_update(update, secret())
    assert list(held.tensors) == ["z", "a"]
    assert float(held.tensors["z"]) == 3.0


def test_a_threshold_out_of_reach_is_told_and_not_waited_for() -> None:
    with pytest.raises(FedsimError, match="tau 1 is out of reach"):
        uploaded(SvtPrivacy(tau=1.0), numbers(50))


@pytest.mark.parametrize("model", ["vit", "convnet"])
def test_it_proves_what_it_did_and_zeros_are_left_out_of_the_match(model: str) -> None:
    stage, trail = Defended("svt_privacy", {}, MODELS[model], rows=(70, 20)), Trail()
    update = stage.uploaded(trail=trail)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("SvtPrivacy", "update")]
    assert stage.defense.encoded_bytes(update) < 0.3 * update.nbytes()
    assert stage.informed()[0].masked
    assert stage.matching_loss(adaptive=True) < stage.matching_loss(adaptive=False)


def test_no_budget_is_promised() -> None:
    assert SvtPrivacy().budget(Exposure(1.0, 1, 1)) is None


def test_the_canary_holds(tmp_path: Path) -> None:
    assert_canary_holds(tmp_path, "{name: svt_privacy}")
