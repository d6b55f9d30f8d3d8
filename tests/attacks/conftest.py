"""What tests of attacks share: what counts as recovered, a good generator, a view."""

from __future__ import annotations

import torch
from torch import nn

from fedsim.core.attack import Reconstruction
from fedsim.core.knowledge import THREATS, Announced, Assets, Desk, View
from fedsim.core.learning import local_update
from fedsim.core.metrics import psnr, ssim
from fedsim.core.models import build_model
from fedsim.core.notebook import Notebook
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec
from tests.staging import attack, convnet, convnet_observation, photos

GENERATOR = {"image_size": 16, "latent_size": 6, "width": 4}


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
        assets=Assets(**assets),
        traffic=traffic,
        desk=Desk(notebook=notebook),
    )


def assert_far_better_than_a_guess(name: str, **params) -> Reconstruction:
    """A matching attack on one photo behind a smooth convolutional network."""
    observation, images = convnet_observation()
    found = attack(observation, name, convnet, **params)
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 5
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.3
    assert found.trace[-1][1] < found.trace[0][1]
    assert found.labels is not None
    assert found.labels.tolist() == [int(photos(16, [70])[1])]
    assert any("engine: first_order" in note for note in found.notes)
    return found


def smooth_vit() -> nn.Module:
    """A ViT of four patches and one block, with positions that matter, as in a trained one."""
    spec = ModelSpec(options={"patch_size": 8, "depth": 1, "num_heads": 3})
    model = build_model(spec, image_size=16, num_classes=8, seed=0)
    with torch.no_grad():
        model.get_parameter("pos_embed").mul_(25)
    return model


def assert_recovered_through_attention(name: str, **params) -> None:
    """A matching attack on one photo behind a Vision Transformer."""
    images, labels = photos(16, [70])
    public = Public.of(Spec(data=DataSpec(image_size=16)), num_classes=8)
    update = local_update(smooth_vit(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, smooth_vit().state_dict(), update, public)
    steps = {"steps": 250, "optimizer": "lbfgs", "lr": 1.0, "schedule": "constant"}
    found = attack(observation, name, smooth_vit, **steps, **params)
    guess = attack(observation, "prior_only", smooth_vit)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 8
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.5
