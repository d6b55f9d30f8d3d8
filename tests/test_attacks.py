"""The attacks, on real photos and small models: what they recover, and what they say when not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.attacks.labels import recover_labels
from fedsim.core.attack import no_progress
from fedsim.core.errors import AttackError, SpecError
from fedsim.core.knowledge import THREATS, PriorModel, View, granted_by
from fedsim.core.learning import Protocol, local_update
from fedsim.core.metrics import psnr, ssim
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, ThreatSpec, TrainSpec
from tests.staging import (
    CPU,
    TINY,
    attack,
    convnet,
    convnet_observation,
    observe,
    photos,
    several_steps,
)

MATCHING = {
    "dlg": {"steps": 120},
    "idlg": {"steps": 80},
    "inverting_gradients": {"steps": 200, "tv": 1e-3},
    "tag": {"steps": 200},
    "deep_inversion": {"steps": 200},
    "grad_inversion": {"steps": 200, "seeds": 2, "preset": "cpu", "tv": 0.001},
}


@pytest.mark.parametrize("name", MATCHING)
def test_matching_attacks_recover_an_image_far_better_than_a_guess(name: str) -> None:
    observation, images = convnet_observation()
    found = attack(observation, name, convnet, **MATCHING[name])
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 5
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.3
    assert found.trace[-1][1] < found.trace[0][1]
    assert found.labels is not None
    assert found.labels.tolist() == [int(photos(16, [70])[1])]
    assert any("engine: first_order" in note for note in found.notes)


def smooth_vit() -> nn.Module:
    """A ViT of four patches and one block, with positions that matter, as in a trained one."""
    spec = ModelSpec(options={"patch_size": 8, "depth": 1, "num_heads": 3})
    model = build_model(spec, image_size=16, num_classes=8, seed=0)
    with torch.no_grad():
        model.get_parameter("pos_embed").mul_(25)
    return model


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("april", {"alpha": 0.1}),
        ("gradvit", {"preset": "cpu", "cost": "l2", "seeds": 1, "tv": 0.0, "patch": 1e-5}),
    ],
)
def test_attacks_on_transformers_recover_an_image(name: str, params: dict) -> None:
    images, labels = photos(16, [70])
    public = Public.of(Spec(data=DataSpec(image_size=16)), num_classes=8)
    update = local_update(smooth_vit(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, smooth_vit().state_dict(), update, public)
    steps = {"steps": 250, "optimizer": "lbfgs", "lr": 1.0, "schedule": "constant"}
    found = attack(observation, name, smooth_vit, **steps, **params)
    guess = attack(observation, "prior_only", smooth_vit)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 8
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.5


@pytest.mark.parametrize("name", ["april", "gradvit", "row_space", "april_closed", "patch_solve"])
def test_attacks_on_transformers_decline_a_convolutional_network(name: str) -> None:
    observation, _ = convnet_observation()
    params = {"steps": 2} if name in ("april", "gradvit") else {}
    with pytest.raises(AttackError, match="Vision Transformers"):
        attack(observation, name, convnet, **params)


def test_gradvit_uses_the_prior_network_in_its_second_phase_only() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    asked = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(len(x))
            return self.layers(x)

    half = (0.5, 0.5, 0.5)
    view = View(
        observation,
        THREATS["D"].grants,
        architecture=lambda: build_model(TINY, image_size=32, num_classes=8, seed=0),
        prior=lambda: PriorModel("watched", Watched(), half, half),
    )
    gradvit = create_attack("gradvit", preset="cpu", steps=10, seeds=1)
    gradvit.reconstruct(view, device=CPU, progress=no_progress)
    assert len(asked) == 5  # of ten steps
    assert "priors" in view.ledger


def test_gradvit_says_when_it_has_no_prior_network() -> None:
    images, labels = photos(32, [5])
    result = attack(observe(TINY, images, labels), "gradvit", preset="cpu", steps=2, seeds=1)
    assert any("no image prior" in note for note in result.notes)


def test_the_presets_of_the_papers() -> None:
    gradvit = create_attack("gradvit")
    assert gradvit.steps == 120_000
    assert gradvit.weights() == {
        "matching": 4e-3,
        "image": 0.2,
        "patch": 1e-4,
        "group": 1e-2,
        "l2": 1e-4,
        "tv": 1e-4,
    }
    assert gradvit.phases() == ((0.0, 4e-3), (0.5, 2e-3))
    inversion = create_attack("grad_inversion")
    named = {"matching": 1e-3, "tv": 1e-4, "l2": 1e-6, "bn": 0.1, "group": 0.01, "langevin": 0.2}
    assert {name: inversion.weight(name) for name in named} == named
    assert inversion.budget().langevin == 0.2
    assert (inversion.lr, inversion.warmup) == (0.1, 50)


def test_a_closed_form_is_a_start_for_matching() -> None:
    images, labels = photos(32, [70])
    observation = observe(TINY, images, labels)
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2, lr=1e-6)
    assert float(psnr(images, result.images)) > 60
    del observation.update.tensors["pos_embed"]
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2)
    assert any("no closed form to start from" in note for note in result.notes)


def test_only_the_selected_layers_are_matched() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    whole = attack(observation, "inverting_gradients", steps=2)
    part = attack(observation, "inverting_gradients", steps=2, parts=["attention"], blocks=[2, 2])
    assert whole.loss != part.loss
    with pytest.raises(AttackError, match="selection"):
        attack(observation, "inverting_gradients", steps=2, blocks=[7, 9])


def test_an_update_with_missing_layers_is_matched_by_the_rest() -> None:
    observation, images = convnet_observation()
    for name in ("0.weight", "0.bias"):
        del observation.update.tensors[name]
    found = attack(observation, "inverting_gradients", convnet, steps=150, tv=1e-3)
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 2


def test_matching_declines_an_update_that_is_not_finite() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["0.weight"][0] = float("nan")
    with pytest.raises(AttackError, match="finite"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_matching_declines_layers_the_model_does_not_have() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["strange.weight"] = torch.ones(2)
    with pytest.raises(AttackError, match="strange"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_the_batch_size_is_read_from_the_rank_where_it_is_withheld() -> None:
    images, labels = photos(32, [1, 100, 200])
    observation = observe(TINY, images, labels)
    granted = granted_by(ThreatSpec(model="B", withhold=["batch_size"]))
    view = View(
        observation,
        granted,
        architecture=lambda: build_model(TINY, image_size=32, num_classes=8, seed=0),
    )
    attack_ = create_attack("inverting_gradients", steps=2)
    result = attack_.reconstruct(view, device=CPU, progress=no_progress)
    assert len(result.images) == 3
    assert "batch_size" not in view.ledger
    assert any("batch size 3" in note for note in result.notes)


def test_a_client_that_clips_its_gradient_is_simulated_with_its_clipping() -> None:
    images, labels = photos(16, [70])
    train = TrainSpec(clip=0.01)
    public = Public.of(Spec(data=DataSpec(image_size=16), train=train), num_classes=8)
    update = local_update(convnet(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, convnet().state_dict(), update, public)
    told = attack(observation, "idlg", convnet, threat="C", steps=60)
    untold = attack(observation, "idlg", convnet, threat="B", steps=60)
    assert float(psnr(images, told.images)) > float(psnr(images, untold.images)) + 3


def test_labels_of_a_clipped_batch_are_counted_without_its_scale() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    images, _ = photos(32, range(0, 480, 120))
    labels = torch.tensor([1, 1, 5, 5])
    protocol = Protocol(clip=0.01)
    update = local_update(model, [(images, labels)], protocol)
    assert recover_labels(update, model, 4, protocol=protocol).tolist() == [1, 1, 5, 5]


def test_oracle_labels_say_how_many_pictures_there_were() -> None:
    observation, _ = several_steps()
    granted = granted_by(ThreatSpec(model="C", oracle_labels=True))
    view = View(observation, granted, architecture=convnet, oracle_labels=torch.tensor([1]))
    result = create_attack("inverting_gradients", steps=2).reconstruct(
        view, device=CPU, progress=no_progress
    )
    assert len(result.images) == 1


# -- several local steps --------------------------------------------------------------------


@pytest.mark.parametrize("local", ["unroll", "surrogate", "single"])
def test_local_steps_are_simulated(local: str) -> None:
    observation, images = several_steps()
    found = attack(
        observation,
        "inverting_gradients",
        convnet,
        threat="C",
        local=local,
        pictures=1,
        steps=150,
        tv=1e-3,
    )
    guess = attack(observation, "prior_only", convnet)
    assert len(found.images) == 1
    margin = 2 if local == "single" else 5  # pretending it was one step costs
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + margin


def test_auto_unrolls_what_it_knows_and_says_what_it_does_not() -> None:
    observation, _ = several_steps()
    told = attack(observation, "inverting_gradients", convnet, threat="C", steps=2)
    assert len(told.images) == 4  # four steps of one picture each
    untold = attack(observation, "inverting_gradients", convnet, threat="B", steps=2)
    assert any("as if it were one gradient step" in note for note in untold.notes)


def test_the_size_of_a_gradient_cannot_be_guessed_from_a_delta() -> None:
    observation, _ = several_steps()
    with pytest.raises(AttackError, match="cosine"):
        attack(observation, "dlg", convnet, threat="B", steps=2)


def test_inverting_gradients_works_through_attention_and_repeats_itself() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    first = attack(observation, "inverting_gradients", steps=4)
    second = attack(observation, "inverting_gradients", steps=4)
    assert torch.equal(first.images, second.images)
    assert first.loss is not None
    assert first.loss < 1.2


def test_prior_only_never_reads_the_update() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    observation.update.tensors.clear()
    result = attack(observation, "prior_only")
    assert torch.equal(result.images, torch.full_like(images, 0.5))


def test_an_unknown_attack_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'patch_solve'"):
        create_attack("patch_slove")


@pytest.mark.parametrize(
    ("params", "expected"),
    [({"step": 3}, "did you mean 'steps'"), ({"steps": 0}, "steps"), ({"lr": "fast"}, "lr")],
)
def test_a_wrong_parameter_is_one_sentence(params: dict, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        create_attack("inverting_gradients", **params)
    assert expected in str(caught.value)


def test_a_spec_names_the_parameters_of_every_group_flat() -> None:
    given = {"steps": 400, "seeds": 4, "init": "grey", "labels": "min", "local": "single"}
    made = create_attack("gradvit", engine="double", blocks=[1, 2], **given)
    assert {name: getattr(made, name) for name in given} == given
    assert made.budget().steps == 400
    with pytest.raises(SpecError, match=r"did you mean 'seeds'\?.*it takes: steps, .*engine.*init"):
        create_attack("gradvit", seedz=4)
