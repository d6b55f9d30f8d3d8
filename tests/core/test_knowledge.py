"""Knowledge: what is not granted cannot be read, what is read is on record."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedsim.core.candidates import Candidates
from fedsim.core.errors import NotGranted, SpecError
from fedsim.core.knowledge import (
    FIELDS,
    READERS,
    THREATS,
    Announced,
    Assets,
    Desk,
    Secrets,
    Traffic,
    View,
    granted_by,
    refuse_unplayed,
)
from fedsim.core.learning import local_update
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Component, ServerSpec, ThreatSpec
from fedsim.defenses.applied import announced


def view(run: Run, threat: str, granted: frozenset[str] | None = None, **more) -> View:
    observation = read_observation(list_observations(run.observations)[0])
    granted = THREATS[threat].grants if granted is None else granted
    return View(observation, granted, Announced(torch.nn.Identity), **more)


def test_threats_grant_what_the_table_says() -> None:
    order = "ABCDE"
    for weaker, stronger in itertools.pairwise(order):
        assert THREATS[weaker].grants < THREATS[stronger].grants
    assert THREATS["F"].grants == THREATS["C"].grants | {"tampering"}
    assert all(threat.grants <= FIELDS.keys() for threat in THREATS.values())
    assert not any("oracle_labels" in threat.grants for threat in THREATS.values())
    assert not any("candidates" in threat.grants for threat in THREATS.values())
    assert granted_by(ThreatSpec(model="B", candidates=4)) == THREATS["B"].grants | {"candidates"}


def test_reading_what_is_not_granted_raises(small_run: Run) -> None:
    eavesdropper = view(small_run, "A")
    assert eavesdropper.update.tensors
    for field in ("image_size", "batch_size", "normalisation", "learning_rate", "defenses"):
        with pytest.raises(NotGranted, match=field):
            getattr(eavesdropper, field)
    with pytest.raises(NotGranted, match="architecture"):
        eavesdropper.model()
    with pytest.raises(NotGranted, match="oracle_labels"):
        _ = view(small_run, "E", secrets=Secrets(torch.tensor([1]))).oracle_labels


def test_what_is_not_granted_is_not_even_there(small_run: Run) -> None:
    held = vars(
        view(small_run, "A", secrets=Secrets(torch.tensor([1])), assets=Assets(torch.ones(1)))
    )
    assert set(held["_known"]) == {"update", "weights"}


def test_every_read_is_in_the_ledger(small_run: Run) -> None:
    informed = view(small_run, "B")
    assert informed.ledger == []
    _ = informed.batch_size, informed.update, informed.batch_size
    assert informed.ledger == ["batch_size", "update"]
    assert not informed.grants("learning_rate")
    assert informed.ledger == ["batch_size", "update"]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_what_is_read_through_a_copy_is_read(small_run: Run, way) -> None:
    informed = view(small_run, "B", desk=Desk(3))
    twin = way(informed)
    assert twin.update.tensors.keys() == informed._known["update"].tensors.keys()
    assert informed.ledger == twin.ledger == ["update"]
    assert torch.equal(
        torch.rand(3, generator=twin.coin()), torch.rand(3, generator=informed.coin())
    )


def test_a_view_is_sent_to_no_other_process(small_run: Run) -> None:
    with pytest.raises(NotGranted, match="sent its View to another process"):
        pickle.dumps(view(small_run, "B"))


def test_the_attackers_coin_is_its_own(small_run: Run) -> None:
    first, second = (view(small_run, "B", desk=Desk(3)) for _ in range(2))
    assert torch.equal(
        torch.rand(3, generator=first.coin()), torch.rand(3, generator=second.coin())
    )


@pytest.mark.parametrize("field", READERS)
def test_every_field_that_is_granted_has_a_reader(small_run: Run, field: str) -> None:
    generous = view(
        small_run,
        "E",
        granted=frozenset(FIELDS),
        secrets=Secrets(torch.tensor([1]), {}, Candidates(torch.ones(1), torch.ones(1))),
        assets=Assets(torch.ones(1), lambda: None, torch.nn.Identity),
        traffic=lambda: Traffic((), lambda round_, client: None),
    )
    value = getattr(generous, READERS[field])
    if callable(value) and not isinstance(value, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # the stand-in has no such weights
            value()
    assert field in generous.ledger


def test_what_has_no_reader_is_granted_to_nobody() -> None:
    for letter in THREATS:
        assert granted_by(ThreatSpec(model=letter)) <= READERS.keys()
    assert FIELDS.keys() - READERS.keys() == {"label_distribution"}


FISHING = Component(name="fishing")


@pytest.mark.parametrize("letter", THREATS)
def test_a_server_does_what_its_letter_is_about_and_no_more(letter: str) -> None:
    threat, still = ThreatSpec(model=letter), ServerSpec()
    active, choosing = ServerSpec(manoeuvre=FISHING), ServerSpec(manoeuvre=FISHING, clients=[0])
    if letter in "ABCDE":
        assert refuse_unplayed(threat, still) is None
        with pytest.raises(SpecError, match=f"threat {letter} .* does not grant; threat F does"):
            refuse_unplayed(threat, active)
        return
    with pytest.raises(SpecError, match=f"threat {letter} .* say how, server.manoeuvre"):
        refuse_unplayed(threat, still)
    if letter == "H":
        assert refuse_unplayed(threat, choosing) is None
        with pytest.raises(SpecError, match=r"say whom, server\.clients"):
            refuse_unplayed(threat, active)
    else:
        assert refuse_unplayed(threat, active) is None
        with pytest.raises(SpecError, match=r"chooses whom to ask.*; H does"):
            refuse_unplayed(threat, choosing)


def _signs(model, batches, protocol, *, rng, seed):
    update = local_update(model, batches, protocol, rng=rng, seed=seed)
    return replace(update, tensors={name: t.sign() for name, t in update.tensors.items()})


def _simulating(run: Run, granted: frozenset[str], *, defended: bool = True) -> tuple[View, bool]:
    """A View on a run whose clients upload signs, and whether its simulated clients do so too."""
    observation = read_observation(list_observations(run.observations)[0])
    public = replace(observation.public, defenses=[{"name": "quantization", "kind": "sign"}])
    told = Announced(lambda: announced(observation.public), client=_signs)
    seen = View(replace(observation, public=public), granted, told)
    side, coin = seen.image_size, torch.Generator().manual_seed(1)
    batch = (torch.rand(1, 3, side, side, generator=coin), torch.zeros(1, dtype=torch.long))
    update = seen.simulated(seen.model(), [batch], coin, defended=defended)
    return seen, all(
        bool((t.abs() <= 1).all() and (t == t.sign()).all()) for t in update.tensors.values()
    )


def test_simulated_clients_defend_themselves_where_that_is_known(small_run: Run) -> None:
    grants = THREATS["C"].grants
    seen, signed = _simulating(small_run, grants)
    assert signed
    assert {"defenses", "optimizer", "learning_rate", "weights"} <= set(seen.ledger)
    assert "update" not in seen.ledger
    for options in ((grants - {"defenses"}, True), (grants, False)):
        seen, signed = _simulating(small_run, options[0], defended=options[1])
        assert not signed
        assert "defenses" not in seen.ledger


def test_a_memory_rests_on_what_was_learned_from(small_run: Run, tmp_path: Path) -> None:
    desk = Desk(memory=tmp_path, learned_from="surrogate")
    owner = view(small_run, "D", assets=Assets(torch.zeros(1, 3, 4, 4)), desk=desk)
    assert owner.memory == tmp_path
    assert owner.ledger == ["surrogate"]
    with pytest.raises(NotGranted, match="surrogate"):
        _ = view(small_run, "C", desk=Desk(memory=tmp_path, learned_from="surrogate")).memory
