"""Training of a generator on the attacker's own pictures, as the decoder of an autoencoder.

A variational autoencoder whose noise level is the one that fits best (the reconstruction term is
D/2 log of the mean squared error, above a floor), so that no weight between its two terms has to be
chosen. A long training leaves checkpoints and goes on from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fedsim.attacks.generators.network import decode, latent_size, latents_of
from fedsim.core.attack import Progress
from fedsim.core.errors import DataError
from fedsim.core.notebook import Notebook, optimizer_tensors, restore_optimizer

_FINEST = 2e-3  # squared error per pixel below which a fit is memory, not knowledge
FEWEST = 8  # pictures; fewer would only be learned by heart


@dataclass(frozen=True)
class Schedule:
    """How long a training goes, and in which steps."""

    steps: int = 2000
    batch_size: int = 64
    lr: float = 2e-3
    save_seconds: float = 30.0

    def rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / 50)
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


class _Encoder(nn.Module):
    """Strided convolutions from an image to mean and log-variance of its latent."""

    def __init__(self, image_size: int, channels: int, latent_size: int, width: int = 32):
        super().__init__()
        layers: list[nn.Module] = []
        before, after, side = channels, width, image_size
        while side > 4:
            layers += [
                nn.Conv2d(before, after, 4, 2, 1),
                nn.BatchNorm2d(after),
                nn.LeakyReLU(0.2),
            ]
            before, after, side = after, min(2 * after, 8 * width), side // 2
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(before * side * side, 2 * latent_size)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.head(self.features(images)).chunk(2, dim=1)
        return mean, spread.clamp(-10, 10)


def train_generator(
    generator: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    schedule: Schedule,
    *,
    seed: int,
    device: torch.device,
    progress: Progress,
    notebook: Notebook | None = None,
    on_save: Callable[[nn.Module, int], None] = lambda generator, step: None,
) -> float:
    """Train on ``images`` (N, 3, H, W) in [0, 1]; the last mean squared error per pixel.

    ``on_save`` is called with the generator (in eval mode) after every checkpoint and at the end.
    """
    if len(images) < FEWEST:
        raise DataError(f"a generator needs at least {FEWEST} pictures to learn from.")
    channels = int(getattr(generator, "channels", 3))
    images = images.mean(1, keepdim=True) if channels == 1 else images
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = _Encoder(images.shape[-1], channels, latent_size(generator)).to(device)
    generator = generator.to(device).requires_grad_(True)
    both = nn.ModuleList([generator, encoder])
    optimizer = torch.optim.Adam(both.parameters(), lr=schedule.lr)
    shapes = [(name, tuple(t.shape)) for name, t in both.state_dict().items()]
    content = float(images.sum(dtype=torch.float64))
    fingerprint = f"{schedule} {seed} {tuple(images.shape)} {content} {shapes}"
    step, error = _resume(notebook, both, optimizer, fingerprint), math.nan
    saved = time.monotonic()
    every = max(1, schedule.steps // 200)
    with torch.random.fork_rng(devices=[]):
        while step < schedule.steps:
            torch.manual_seed(seed * 1_000_003 + step)  # by step: a resume draws the same
            both.train()
            rows = torch.randint(len(images), (min(schedule.batch_size, len(images)),))
            batch = _varied(images[rows]).to(device)
            classes = labels[rows].to(device) if labels is not None else None
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            loss, square = _loss(generator, encoder, batch, classes)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(both.parameters(), 100.0)
            optimizer.step()
            step += 1
            if step % every == 0 or step == schedule.steps:
                error = float(square)
                progress(step, schedule.steps, error)
            if notebook is not None and time.monotonic() - saved >= schedule.save_seconds:
                _save(notebook, both, optimizer, step, fingerprint)
                on_save(generator.eval(), step)
                saved = time.monotonic()
    on_save(generator.eval(), step)
    if notebook is not None:
        notebook.clear()
    return error


def _varied(batch: Tensor) -> Tensor:
    """Each picture mirrored or not, and moved by up to a sixteenth of its side."""
    flip = torch.rand(len(batch)) < 0.5
    batch = torch.where(flip[:, None, None, None], batch.flip(-1), batch)
    far, side = batch.shape[-1] // 16, batch.shape[-1]
    padded = F.pad(batch, (far, far, far, far), mode="replicate")
    down, across = torch.randint(2 * far + 1, (2, len(batch))).tolist()
    moved = [
        picture[:, y : y + side, x : x + side]
        for picture, y, x in zip(padded, down, across, strict=True)
    ]
    return torch.stack(moved)


def _loss(
    generator: nn.Module, encoder: _Encoder, batch: Tensor, classes: Tensor | None
) -> tuple[Tensor, Tensor]:
    mean, spread = encoder(batch)
    z = mean + torch.randn_like(mean) * (spread / 2).exp()
    made = decode(generator, latents_of(generator, z), classes)
    square = F.mse_loss(made, batch)
    pixels = batch[0].numel()
    fit = pixels / 2 * torch.log(square + _FINEST)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return fit + divergence, square.detach()


def _save(
    notebook: Notebook, both: nn.Module, optimizer: Optimizer, step: int, fingerprint: str
) -> None:
    tensors = {f"model.{k}": v for k, v in both.state_dict().items()}
    notebook.save(
        tensors | optimizer_tensors(optimizer), {"step": step, "fingerprint": fingerprint}
    )


def _resume(
    notebook: Notebook | None, both: nn.Module, optimizer: Optimizer, fingerprint: str
) -> int:
    page = notebook.load() if notebook is not None else None
    if page is None or page[1].get("fingerprint") != fingerprint:
        return 0
    tensors, about = page
    model = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    both.load_state_dict(model)
    restore_optimizer(optimizer, tensors)
    return int(about["step"])
