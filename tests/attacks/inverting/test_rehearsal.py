"""Rehearsals: the same number is the same client, and pictures come as they are before variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.attacks.inverting.rehearsal import Layout, Rehearsal, batch_of, read_labels, shrunk
from fedsim.core.knowledge import View
from fedsim.core.learning import Batch, Protocol, Update, local_update
from tests.attacks.conftest import view_of
from tests.staging import convnet_observation, photos

CPU = torch.device("cpu")


def rehearsal(layout: Layout | None = None, pictures: int = 6, **options: Any) -> Rehearsal:
    observation, images = convnet_observation()
    surrogate, _ = photos(images.shape[-1], range(40, 40 + pictures))
    given = {"entries": 200, "seed": 3, "device": CPU, **options}
    return Rehearsal(view_of(observation), surrogate, layout or Layout(1), **given)


def test_the_same_number_is_the_same_client() -> None:
    one, two = rehearsal().example(4), rehearsal().example(4)
    assert torch.equal(one.sketch, two.sketch)
    assert torch.equal(one.pictures, two.pictures)
    assert not torch.equal(one.sketch, rehearsal(seed=4).example(4).sketch)


def test_every_picture_is_used_as_it_is_before_any_variant() -> None:
    theirs = rehearsal()
    seen = [theirs.example(number).pictures[0] for number in range(12)]
    held = shrunk(theirs.pictures).half()

    def is_held(picture: Tensor) -> list[bool]:
        return [torch.equal(picture, own) for own in held]

    assert sorted(is_held(p).index(True) for p in seen[:6]) == [0, 1, 2, 3, 4, 5]
    assert not any(any(is_held(picture)) for picture in seen[6:])


def test_labels_are_read_from_the_simulated_update() -> None:
    theirs = rehearsal()
    examples = batch_of([theirs.example(number) for number in range(6)])
    assert torch.equal(examples.read, examples.labels)
    assert examples.pictures.shape[:2] == (6, 1)
    assert theirs.classes == 8


def test_labels_are_drawn_half_by_the_model_and_half_evenly() -> None:
    theirs = rehearsal()
    assert torch.allclose(theirs.chances.sum(1), torch.ones(6))
    assert float(theirs.chances.min()) >= 1 / 16


def test_local_steps_take_batches_of_other_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[Batch]] = []

    def watched(self: View, model: nn.Module, batches: Sequence[Batch], coin: Any, **_: Any):
        shown.append(list(batches))
        return local_update(model, batches, Protocol(upload="delta"))

    monkeypatch.setattr(View, "simulated", watched)
    example = rehearsal(Layout(2, steps=2)).example(0)
    assert [len(images) for images, _ in shown[-1]] == [2, 2]
    stacked = torch.cat([images for images, _ in shown[-1]])
    assert torch.equal(shrunk(stacked).half(), example.pictures)
    assert len({picture.sum().item() for picture in stacked}) == 4


def test_pictures_are_augmented_as_announced() -> None:
    observation, _ = convnet_observation()
    augment = ({"name": "RandomInvert", "p": 1.0},)
    announced = replace(observation.public.protocol, augment=augment)
    public = replace(observation.public, protocol=announced)
    surrogate, _ = photos(16, range(40, 44))
    view = view_of(replace(observation, public=public))
    theirs = Rehearsal(view, surrogate, Layout(1), entries=100, seed=0, device=CPU)
    mean = torch.stack([theirs.example(n).pictures for n in range(4)]).float().mean()
    assert float(mean) == pytest.approx(1 - float(surrogate.mean()), abs=1e-2)


def test_other_pictures_keep_the_sketch() -> None:
    theirs = rehearsal()
    others = theirs.on(photos(theirs.pictures.shape[-1], [60, 61])[0], "held out")
    assert others.sketch is theirs.sketch
    assert len(others.pictures) == 2
    assert len(theirs.pictures) == 6
    assert others.seed != theirs.seed


def test_labels_that_nothing_shows_are_none() -> None:
    observation, _ = convnet_observation()
    view = view_of(observation)
    body = {n: t for n, t in view.update.tensors.items() if "head" not in n and "fc" not in n}
    update = Update(view.update.kind, {n: body[n] for n in list(body)[:1]})
    assert read_labels(view, view.model(), update, Layout(1)) is None


def test_what_is_learned_has_32_pixels_at_most() -> None:
    assert shrunk(torch.rand(2, 3, 80, 80)).shape == (2, 3, 32, 32)
    assert shrunk(torch.rand(2, 3, 20, 20)).shape == (2, 3, 20, 20)
