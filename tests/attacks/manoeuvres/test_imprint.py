"""The weights of an imprint: what they leave as it was, and the models it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.attacks.manoeuvres.imprint import ImprintWeights, class_levels
from fedsim.core.errors import SpecError
from fedsim.core.learning import local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.imprinted import CLASSES, MODEL, SIDE, VICTIMS, brief_of, loaded, public_of
from tests.staging import photos


def refused(name: str, options: dict[str, Any], train: TrainSpec | None = None) -> str:
    spec = ModelSpec(name=name, options=options)
    model = build_model(spec, image_size=SIDE, num_classes=CLASSES, seed=0)
    with pytest.raises(SpecError) as error:
        ImprintWeights().check_model(model, public_of(spec, train))
    return str(error.value)


def test_it_changes_weights_alone_and_says_so_in_plain_values() -> None:
    manoeuvre = create_manoeuvre("imprint", rulers=4)
    brief = brief_of(manoeuvre, public_of())
    tampered = manoeuvre.tamper(brief)
    assert tampered.changed.keys() <= brief.weights.keys()
    for name, tensor in tampered.changed.items():
        assert tensor.shape == brief.weights[name].shape
        assert not torch.equal(tensor, brief.weights[name])
        assert bool(torch.isfinite(tensor).all())
    plain = (bool, int, float, str)
    for value in tampered.about.values():
        assert isinstance(value, plain) or all(isinstance(v, plain) for v in value)
    assert "pictures of the server's own" in tampered.words


def test_without_surrogate_the_words_say_that_pictures_were_imagined() -> None:
    brief = brief_of(ImprintWeights(), public_of(), surrogate=False)
    assert "imagined" in ImprintWeights().tamper(brief).words


def test_all_clients_of_a_round_get_the_same_weights_and_the_next_round_others() -> None:
    manoeuvre = ImprintWeights()
    first = manoeuvre.tamper(brief_of(manoeuvre, public_of()))
    again = manoeuvre.tamper(brief_of(manoeuvre, public_of()))
    later = manoeuvre.tamper(brief_of(manoeuvre, public_of(), round_=2))
    assert all(torch.equal(t, again.changed[n]) for n, t in first.changed.items())
    assert not torch.equal(first.changed["pos_embed"], later.changed["pos_embed"])


def test_the_loss_is_that_of_a_guess_and_the_gradient_far_below_the_admission_limit() -> None:
    manoeuvre = ImprintWeights()
    brief = brief_of(manoeuvre, public_of())
    model = loaded(brief, manoeuvre.tamper(brief))
    images, labels = photos(SIDE, VICTIMS)
    update = local_update(model, [(images, labels)], brief.public.protocol)
    assert update.loss == pytest.approx(float(torch.tensor(CLASSES).log()), abs=0.01)
    size = sum(float(t.norm()) ** 2 for t in update.tensors.values()) ** 0.5
    initial = sum(float(t.norm()) ** 2 for t in brief.weights.values()) ** 0.5
    assert size < 1e5 * initial


def test_the_bins_leave_the_tokens_as_they_came() -> None:
    manoeuvre = ImprintWeights()
    brief = brief_of(manoeuvre, public_of())
    model: Any = loaded(brief, manoeuvre.tamper(brief))
    images = brief.public.protocol.normalise(photos(SIDE, VICTIMS)[0])
    with torch.no_grad():
        first = model.blocks[0](model._pos_embed(model.patch_embed(images)))
        second = model.blocks[1](first)
        assert torch.allclose(first, second, atol=2e-3)
        assert float(first.mean(-1).abs().max()) < 1e-3  # balanced: LayerNorm only scales
        normed = F.layer_norm(first, first.shape[-1:])
        layout = range(normed.shape[-1])
        assert len(layout) == MODEL.options["embed_dim"]


def test_levels_of_classes_are_all_different_and_none_is_their_mean() -> None:
    levels = class_levels(1000)
    assert len(levels.unique()) == 1000
    assert float((levels - levels.mean()).abs().min()) > 0.5


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("resnet18", {}, "Vision Transformer"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "global_pool": "map"}, "pools by 'map'"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 1}, "one block"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "drop_path_rate": 0.1}, "at random"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "proj_bias": False}, "no bias"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "norm_layer": "rmsnorm"}, "LayerNorm"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "act_layer": "tanh"}, "activation"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "embed_dim": 30}, "width of 30"),
        ("vit_tiny_patch16_224", {"patch_size": 8, "pos_embed": "none"}, "position embedding"),
        ("deit_tiny_distilled_patch16_224", {"patch_size": 8}, "plain"),
    ],
)
def test_a_model_on_which_it_cannot_work_is_refused(name, options, reason) -> None:
    assert reason in refused(name, options)


def test_what_is_dropped_at_random_matters_in_training_mode_alone() -> None:
    spec = ModelSpec(options={"patch_size": 8, "drop_path_rate": 0.1})
    model = build_model(spec, image_size=SIDE, num_classes=CLASSES, seed=0)
    assert ImprintWeights().check_model(model, public_of(spec, TrainSpec(mode="eval"))) is None
