"""Attacks through generators: spaces, GIAS, joint inversion, R-GAP with a generator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.attacks.generators import create_generator, generate
from fedsim.attacks.gias import Gias, centre_of, draw_latents
from fedsim.attacks.joint import JointMatcher, share_images
from fedsim.attacks.matching.matcher import Match
from fedsim.attacks.matching.spaces import Latents, Pixels, Weights
from fedsim.campaign.plan import prepare
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import AttackError, NotGranted, SpecError
from fedsim.core.knowledge import THREATS, Announced, Assets, Desk, Traffic, View
from fedsim.core.metrics import psnr
from fedsim.core.notebook import Notebook
from fedsim.core.observation import Observation
from fedsim.core.spec import ModelSpec
from tests.conftest import small_spec
from tests.staging import CPU, convnet, convnet_observation, observe_net, photos

SMALL = {"image_size": 16, "latent_size": 6, "width": 4}


def half(images: torch.Tensor) -> torch.Tensor:
    return (images - 0.5) / 0.5


class Basis(nn.Module):
    """A generator that is good by construction: pictures from a few directions."""

    latent_size = 6

    def __init__(self, channels: int = 3):
        super().__init__()
        images, _ = photos(16, [70, 10, 20, 30, 40, 50])
        self.basis = nn.Parameter(images.clamp(0.02, 0.98).logit().flatten(1))
        self.shape = images.shape[1:]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(z @ self.basis).view(-1, *self.shape)


def view_of(
    observation: Observation,
    threat: str = "D",
    notebook: Notebook | None = None,
    traffic=None,
    **assets,
) -> View:
    return View(
        observation,
        THREATS[threat].grants,
        Announced(convnet),
        desk=Desk(notebook=notebook),
        assets=Assets(**assets),
        traffic=traffic,
    )


def gias(observation: Observation, generator=None, **params) -> Reconstruction:
    view = view_of(observation, generator=generator)
    attack = create_attack("gias", **params)
    result = attack.reconstruct(view, device=CPU, progress=no_progress)
    assert set(view.ledger) <= attack.needs | Gias.uses
    return result


# -- spaces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcgan", "stylegan"])
def test_every_image_has_its_own_copy_of_the_weights(name: str) -> None:
    net = create_generator(name, SMALL).requires_grad_(False)
    latents = draw_latents(net, 2, 3, torch.Generator().manual_seed(0))
    labels = torch.zeros(2, 3, dtype=torch.long)
    space = Weights(net, latents, labels, half)
    whole = Latents(net, latents, labels, half, centre_of(net, CPU))
    assert torch.allclose(space.images(), whole.images(), atol=1e-5)
    with torch.no_grad():
        for variable in space.variables:
            variable[0, 1] *= 1.1
    changed = (space.images() - whole.images()).abs().flatten(2).amax(2) > 1e-5
    assert changed.tolist() == [[False, True, False], [False, False, False]]


def test_latents_are_drawn_to_the_middle() -> None:
    net = create_generator("stylegan", SMALL).requires_grad_(False)
    latents = draw_latents(net, 2, 3, torch.Generator().manual_seed(0))
    labels = torch.zeros(2, 3, dtype=torch.long)
    centre = centre_of(net, CPU)
    space = Latents(net, latents, labels, half, centre, weight=0.5)
    by_hand = 0.5 * (latents - centre).square().flatten(2).sum(2).mean(1)
    penalty = space.penalty()
    assert penalty is not None
    assert torch.allclose(penalty, by_hand)
    assert Latents(net, latents, labels, half, centre).penalty() is None


def test_grey_pixels_are_one_channel_in_the_box() -> None:
    low = torch.tensor([-1.0, -2.0, -3.0]).view(3, 1, 1)
    high = torch.tensor([1.0, 1.0, 2.0]).view(3, 1, 1)
    space = Pixels(torch.randn(1, 2, 3, 4, 4) * 5, low, high, grey=True)
    assert space.variables[0].shape == (1, 2, 1, 4, 4)
    space.constrain()
    pixels = (space.images() - low) / (high - low)
    assert torch.allclose(pixels[:, :, 0], pixels[:, :, 2], atol=1e-6)
    assert 0 <= float(pixels.detach().min()) <= float(pixels.detach().max()) <= 1


# -- GIAS ---------------------------------------------------------------------------------------


def test_latents_of_a_good_generator_find_the_picture() -> None:
    observation, images = convnet_observation()
    found = gias(observation, Basis, space="z", steps=300, seeds=8, lr_z=0.1)
    guess = generate(Basis(), torch.zeros(1, 6)).detach()
    assert float(psnr(images, found.images)) > float(psnr(images, guess)) + 30


def test_refining_continues_from_the_latents() -> None:
    observation, images = convnet_observation()
    alone = gias(observation, Basis, space="z", steps=30, seeds=2, lr_z=0.1)
    refined = gias(
        observation, Basis, space="z/x", steps=30, refine=200, seeds=2, lr_z=0.1, lr=0.02
    )
    adapted = gias(
        observation, Basis, space="z/w", steps=30, refine=100, seeds=2, lr_z=0.1, lr_w=0.01
    )
    assert refined.loss < alone.loss
    assert adapted.loss < alone.loss
    assert float(psnr(images, refined.images)) > float(psnr(images, alone.images))
    assert [step for step, _ in refined.trace][-1] == 230


def test_an_untrained_generator_is_a_prior_of_its_own() -> None:
    observation, images = convnet_observation()
    found = gias(observation, space="w", steps=150, seeds=1, lr_w=0.01, options=SMALL)
    assert float(psnr(images, found.images)) > 12
    assert "generator" not in found.ledger


def test_a_trained_generator_must_be_granted() -> None:
    observation, _ = convnet_observation()
    with pytest.raises(NotGranted, match="generator"):
        gias(observation, None, space="z", steps=2)
    assert "generator" in create_attack("gias", space="z/w").needs
    assert "generator" not in create_attack("gias", space="w").needs
    assert "generator" not in create_attack("gias", space="x").needs
    spec = small_spec("attacks=[{name: gias}]")
    with pytest.raises(NotGranted, match=r"'gias' needs generator.*threat D does"):
        prepare(spec)


def test_a_generator_of_another_size_is_refused_before_any_round(tmp_path: Path) -> None:
    from fedsim.attacks.generators import save_generator

    file = tmp_path / "g.safetensors"
    save_generator(file, "dcgan", SMALL, create_generator("dcgan", SMALL))
    threat = f"threat={{model: D, generator: {{checkpoint: {file}}}}}"
    with pytest.raises(Exception, match="makes images of 16 pixels and the clients' have 32"):
        prepare(small_spec("attacks=[{name: gias}]", threat))
    weak = f"threat={{model: C, generator: {{checkpoint: {file}}}}}"
    with pytest.raises(SpecError, match="threat C grants no generator"):
        prepare(small_spec(weak))


def test_a_generator_of_the_clients_own_data_is_refused(tmp_path: Path) -> None:
    from fedsim.attacks.generators import save_generator

    options = {**SMALL, "image_size": 32}
    file = tmp_path / "g.safetensors"
    own = {"name": "photos", "path": None}
    save_generator(file, "dcgan", options, create_generator("dcgan", options), trained_on=own)
    threat = f"threat={{model: D, generator: {{checkpoint: {file}}}}}"
    with pytest.raises(SpecError, match="trained on the clients' own data"):
        prepare(small_spec(threat))


def test_an_attack_goes_on_after_the_stage_that_was_done(tmp_path: Path) -> None:
    observation, _ = convnet_observation()
    attack = create_attack("gias", space="z/x", steps=20, refine=20, seeds=2, checkpoint_seconds=0)
    whole = attack.reconstruct(
        view_of(observation, generator=Basis), device=CPU, progress=no_progress
    )
    seen: list[int] = []

    def cut(done: int, total: int, loss: float | None = None) -> None:
        if done > 30:
            raise KeyboardInterrupt

    def watch(done: int, total: int, loss: float | None = None) -> None:
        seen.append(done)

    notebook = Notebook(tmp_path / "page.safetensors")
    with pytest.raises(KeyboardInterrupt):
        attack.reconstruct(
            view_of(observation, "D", notebook, generator=Basis), device=CPU, progress=cut
        )
    again = attack.reconstruct(
        view_of(observation, "D", notebook, generator=Basis), device=CPU, progress=watch
    )
    assert min(seen) > 30
    assert torch.equal(whole.images, again.images)
    assert list(tmp_path.iterdir()) == []


# -- joint inversion ----------------------------------------------------------------------------


def test_images_are_shared_by_their_labels() -> None:
    rows, classes = share_images([[1, 4], [4, 4, 2], [1, 2]])
    assert classes == [1, 4, 4, 2]
    assert rows == [[0, 1], [1, 2, 3], [0, 3]]


def test_a_joint_loss_is_the_mean_of_its_parts() -> None:
    class Pull:
        def __init__(self, target: float):
            self.target, self.notes = target, list[str]()

        def __call__(self, images, labels):
            apart = images - self.target
            return Match(apart.square().flatten(1).sum(1), 2 * apart, None)

        def state(self):
            return {"target": self.target}

        def restore(self, state):
            self.target = state["target"]

    matcher = JointMatcher([Pull(0.0), Pull(1.0)], [[0, 1], [1]])
    images = torch.full((2, 2, 3, 2, 2), 0.5)
    match = matcher(images, torch.zeros(2, 2, dtype=torch.long))
    assert torch.allclose(match.value, torch.full((2,), (0.25 * 24 + 0.25 * 12) / 2))
    assert torch.allclose(match.images[:, 0], torch.full((2, 3, 2, 2), 0.5))
    assert torch.allclose(match.images[:, 1], torch.zeros(2, 3, 2, 2))
    matcher.restore({"0.target": 3.0, "1.target": 4.0})
    assert matcher.state() == {"0.target": 3.0, "1.target": 4.0}


def rounds_of_one_client(count: int) -> tuple[dict[tuple[int, int], Observation], torch.Tensor]:
    """The same two pictures behind every round, under fresh weights each time."""
    images, _ = photos(16, [70, 20])
    labels = torch.tensor([1, 5])
    found = {}
    for round_ in range(1, count + 1):
        torch.manual_seed(round_)
        net = convnet()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        observation = observe_net(net, ModelSpec(), images, labels)
        public = replace(observation.public, batch_size=2)
        found[round_, 0] = replace(observation, round=round_, public=public)
    return found, images


def test_more_rounds_of_the_same_pictures_show_more() -> None:
    observations, images = rounds_of_one_client(4)

    def open_(round_: int, client: int) -> View:
        return view_of(observations[round_, client], "C")

    view = view_of(observations[4, 0], "C", traffic=lambda: Traffic(tuple(observations), open_))
    results = [
        create_attack("joint", rounds=n, steps=200, tv=1e-3).reconstruct(
            view, device=CPU, progress=no_progress
        )
        for n in (1, 4)
    ]
    one, four = (float(psnr(images, r.images).mean()) for r in results)
    assert four > one + 2
    assert any("4 updates of client 0, 2 images" in note for note in results[1].notes)


def test_joint_inversion_needs_labels() -> None:
    observations, _ = rounds_of_one_client(1)
    view = view_of(observations[1, 0], "C", traffic=lambda: Traffic((), lambda r, c: None))
    with pytest.raises(AttackError, match="tells images apart by their labels"):
        create_attack("joint", labels="joint").reconstruct(view, device=CPU, progress=no_progress)


# -- R-GAP --------------------------------------------------------------------------------------


def test_rgap_fills_a_layer_that_loses_information_from_a_generator() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [4, 6], "activation": "leaky_relu"})
    from fedsim.core.models import build_architecture, build_model

    images, labels = photos(16, [70])
    net = build_model(spec, image_size=16, num_classes=8, seed=0)
    observation = observe_net(net, spec, images, labels)

    def factory() -> nn.Module:
        return build_architecture(spec, image_size=16, num_classes=8)

    def run(**params) -> Reconstruction:
        view = View(
            observation,
            THREATS["D"].grants,
            Announced(factory),
            assets=Assets(generator=lambda: Basis()),
        )
        return create_attack("rgap", **params).reconstruct(view, device=CPU, progress=no_progress)

    plain, filled = run(), run(generator="underdetermined", steps=200)
    assert any(note.startswith("underdetermined") for note in plain.notes)
    assert any("from the generator" in note for note in filled.notes)
    assert float(psnr(images, filled.images)) > float(psnr(images, plain.images)) + 3
    assert "generator" in create_attack("rgap", generator="all").needs
