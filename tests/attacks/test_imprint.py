"""The imprint, decoded: whole batches of one class, and what is said where they are not whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedsim.attacks.closed.peeling import Tokens
from fedsim.attacks.imprint import Picture, filled, gather, merge, read_update
from fedsim.attacks.manoeuvres.imprint import ImprintWeights
from fedsim.attacks.manoeuvres.imprinting import Layout, patch_basis
from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import local_update
from fedsim.core.metrics import psnr
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.imprinted import (
    MODEL,
    SIDE,
    VICTIMS,
    brief_of,
    decoded,
    loaded,
    played,
    public_of,
    view_of,
)
from tests.staging import photos

WIDE = {"patch_size": 4, "depth": 3, "embed_dim": 96, "num_heads": 3}  # all coefficients fit
DELTA = TrainSpec(batch_size=4, upload="delta", local_steps=1, lr=0.05)


def batch() -> torch.Tensor:
    return photos(SIDE, VICTIMS)[0]


def best(images: torch.Tensor, found: torch.Tensor) -> list[float]:
    """For every true picture, the PSNR of what is most like it."""
    return [float(psnr(image.expand_as(found), found).max()) for image in images]


def ceiling(view: View, images: torch.Tensor) -> list[float]:
    """What any reading could have at best: some coefficients find no room in a token."""
    layout = Layout.told(view.chosen)
    basis = patch_basis(*layout.patch)[: layout.pixels].float()
    coefficients = F.unfold(2 * images - 1, layout.patch, stride=layout.patch).mT @ basis.T
    shape, patch = images.shape[-2:], layout.patch
    room = F.fold((coefficients @ basis).mT, shape, patch, stride=patch)
    return psnr(images, (room / 2 + 0.5).clamp(0, 1)).tolist()


def assert_whole(view: View, images: torch.Tensor, short: float = 0.5) -> None:
    """Every picture, as well as a token has room for."""
    found = decoded(view)
    assert len(found.images) == len(images)
    for score, most in zip(best(images, found.images), ceiling(view, images), strict=True):
        assert score > min(most, 60) - short
    assert any("0 filled in" in note for note in found.notes)
    assert "0 tokens could not be placed" in found.notes


def patches_right(view: View, images: torch.Tensor) -> tuple[int, int]:
    """Patches read, and those that are in the right place of one true picture."""
    layout = Layout.told(view.chosen)
    basis = patch_basis(*layout.patch)[: layout.pixels]
    truth = F.unfold((2 * images - 1).double(), layout.patch, stride=layout.patch).mT @ basis.T
    model = view.model()
    read = right = 0
    for picture in read_update(view, model, vit_parts(model)).pictures:
        mine = torch.stack(list(picture.patches.values())) @ basis.T
        apart = (truth[:, list(picture.patches)] - mine).square().mean(-1).sqrt()
        read += len(mine)
        right += int((apart < 0.05).sum(1).max())
    return read, right


def test_a_batch_of_one_class_is_read_whole_and_in_the_right_places() -> None:
    images = batch()
    view = played(ImprintWeights(), images)
    assert_whole(view, images)
    assert patches_right(view, images) == (64, 64)


def test_with_room_for_all_coefficients_the_pictures_are_exact() -> None:
    images = batch()
    view = played(ImprintWeights(), images, model=ModelSpec(options=WIDE))
    assert min(best(images, decoded(view).images)) > 60


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": False, "global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"pre_norm": True},
        {"qkv_bias": False, "init_values": 1e-5, "no_embed_class": True, "reg_tokens": 2},
        {"act_layer": "relu", "depth": 2, "qk_norm": True},
    ],
)
def test_it_works_on_the_kin_of_the_plain_model(options: dict) -> None:
    images = batch()
    assert_whole(
        played(ImprintWeights(), images, model=ModelSpec(options={**MODEL.options, **options})),
        images,
    )


def test_no_pictures_of_the_servers_own_are_needed() -> None:
    images = batch()
    assert_whole(played(ImprintWeights(), images, surrogate=False), images)


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.01}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip": 1.0}]
)
def test_one_local_step_is_read_like_a_gradient(options: dict) -> None:
    images = batch()
    train = DELTA.model_copy(update=options)
    assert_whole(played(ImprintWeights(), images, train=train), images)


def test_every_local_step_leaves_its_pictures() -> None:
    images = batch()
    train = DELTA.model_copy(update={"batch_size": 1, "local_steps": 4})
    assert_whole(played(ImprintWeights(), images, train=train, steps=4), images)


def test_one_step_of_adamw_is_read_as_well() -> None:
    images = batch()
    train = DELTA.model_copy(update={"optimizer": "adamw", "lr": 0.001})
    assert_whole(played(ImprintWeights(), images, train=train), images)


def test_a_sum_over_a_cohort_in_fixed_point_is_a_larger_batch() -> None:
    images, manoeuvre = batch(), ImprintWeights()
    public = public_of(train=TrainSpec(batch_size=2))
    brief = brief_of(manoeuvre, public, cohort=(0, 1))
    tampered = manoeuvre.tamper(brief)
    model, labels = loaded(brief, tampered), torch.tensor([3, 3])
    updates = [local_update(model, [(x, labels)], public.protocol) for x in images.split(2)]
    unit = 2.0**-24
    total = {
        name: sum((u.tensors[name].double() / unit).round() * unit for u in updates) / 2
        for name in updates[0].tensors
    }
    mean = replace(updates[0], tensors={n: t.float() for n, t in total.items()})
    assert_whole(view_of(brief, tampered, mean), images)


def test_labels_are_told_picture_by_picture() -> None:
    images, labels = batch(), torch.tensor([5, 2, 2, 7])
    found = decoded(played(ImprintWeights(), images, labels))
    assert found.labels is not None
    whose = [int(psnr(i.expand_as(images), images).argmax()) for i in found.images]
    assert found.labels.tolist() == labels[whose].tolist()


def crowded() -> tuple[View, torch.Tensor]:
    """More tokens than a narrow model's bins can take apart."""
    images, _ = photos(SIDE, range(0, 240, 10))
    narrow = ModelSpec(options={**MODEL.options, "depth": 2, "mlp_ratio": 4.0})
    return played(ImprintWeights(), images, model=narrow), images


def test_what_is_read_of_a_crowd_is_right_and_what_is_not_is_marked() -> None:
    view, images = crowded()
    read, right = patches_right(view, images)
    assert 0 < read < 16 * len(images)
    assert right >= 0.995 * read
    found = decoded(view)
    counted = [note for note in found.notes if note.startswith("picture ")]
    assert len(counted) == len(found.images)
    assert any(" 0 filled in" not in note for note in counted)


def test_what_one_round_left_out_is_taken_from_an_earlier_one() -> None:
    images, manoeuvre, views = batch(), ImprintWeights(), {}
    for number in (1, 2):
        brief = brief_of(manoeuvre, public_of(), round_=number)
        tampered = manoeuvre.tamper(brief)
        labels = torch.full((len(images),), 3)
        update = local_update(loaded(brief, tampered), [(images, labels)], brief.public.protocol)
        views[number] = view_of(brief, tampered, update, dict(views))
    update.tensors["blocks.0.mlp.fc1.weight"][150:250] = 0  # some bins are lost on the way
    alone, together = decoded(views[2], rounds=1), decoded(views[2])
    assert alone.loss is not None
    assert alone.loss > 0.05
    assert together.loss == 0
    assert any("1 earlier rounds" in note for note in together.notes)
    assert min(best(images, together.images)) > min(best(images, alone.images)) + 3


def test_a_mixture_of_two_tokens_is_not_claimed() -> None:
    """Two tokens of one place that share all their bins: nothing of them may be told."""
    images = batch()[:1].repeat(2, 1, 1, 1)
    images[1, :, :8, :8] = 1 - images[1, :, :8, :8]  # signatures nearly alike, one patch is not
    view = played(ImprintWeights(), images)
    read, right = patches_right(view, images)
    assert right == read


def test_tokens_that_claim_one_place_are_told_apart_by_their_votes() -> None:
    x = torch.zeros(4, 2, dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    tokens = Tokens(x, torch.tensor([0, 1, 1, 2]), torch.tensor([3, 1, 4, 2]), one, one)
    patches = torch.arange(4.0)[:, None]
    reading = gather(tokens, torch.zeros(4, 3), patches, one, fewest=3)
    assert {at: float(p) for at, p in reading.pictures[0].patches.items()} == {0: 0, 1: 2, 2: 3}
    assert reading.unplaced == 1
    even = replace(tokens, votes=torch.tensor([3, 4, 4, 2]))
    assert gather(even, torch.zeros(4, 3), patches, one, fewest=3).pictures == []


def test_pictures_with_nearly_one_signature_are_still_two() -> None:
    places = torch.arange(8) % 4
    one = torch.ones(8, dtype=torch.float64)
    tokens = Tokens(torch.zeros(8, 2), places, torch.ones(8, dtype=torch.long), one, one)
    signature = torch.zeros(8, 3)
    signature[4:] = 0.02
    patches = torch.arange(8.0)[:, None]
    first, second = gather(tokens, signature, patches, one, fewest=3).pictures
    assert {float(p) for p in first.patches.values()} == {0, 1, 2, 3}
    assert {float(p) for p in second.patches.values()} == {4, 5, 6, 7}


def test_pictures_that_are_much_alike_are_not_confused() -> None:
    images = batch()
    images[1] = images[0] * 0.97
    view = played(ImprintWeights(), images)
    read, right = patches_right(view, images)
    assert read > 56
    assert right == read


def test_pictures_that_differ_where_both_were_read_are_not_merged() -> None:
    dark = {at: torch.zeros(3) for at in range(4)}
    mine = Picture(torch.zeros(1), dict(dark), 1.0)
    other = Picture(torch.zeros(1), {**dark, 0: torch.ones(3), 5: torch.ones(3)}, 1.0)
    assert merge([mine], [other]) == 0
    same = Picture(torch.zeros(1), {**dark, 5: torch.ones(3)}, 1.0)
    assert merge([mine], [same]) == 1


def test_filling_leaves_what_is_known_and_is_smooth_between() -> None:
    image = torch.linspace(0, 1, 12).expand(3, 12, 12).double()
    known = torch.ones(12, 12, dtype=torch.bool)
    known[:, 4:8] = False
    out = filled(torch.where(known, image, 0.0), known)
    assert torch.equal(out[:, known], image[:, known])
    assert torch.allclose(out, image, atol=0.02)


def test_weights_without_an_imprint_are_declined() -> None:
    manoeuvre = ImprintWeights()
    brief = brief_of(manoeuvre, public_of())
    honest = manoeuvre.tamper(brief)
    model = brief.loaded()
    update = local_update(model, [(batch(), torch.tensor([3] * 4))], brief.public.protocol)
    bare = replace(honest, changed={}, about={})
    with pytest.raises(AttackError, match="manoeuvre"):
        decoded(view_of(brief, bare, update))
    with pytest.raises(AttackError, match="no imprint"):
        decoded(view_of(brief, replace(honest, changed={}), update))


def test_an_update_of_noise_is_declined() -> None:
    view = played(ImprintWeights(), batch())
    coin = torch.Generator().manual_seed(0)
    for tensor in view.update.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=coin))
    with pytest.raises(AttackError, match="no token"):
        decoded(view)
