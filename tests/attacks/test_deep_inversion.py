"""DeepInversion: pictures of given classes from a model alone, the papers' baseline."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from fedsim.attacks import create_attack
from fedsim.attacks.deep_inversion import Classified
from fedsim.attacks.matching import FeaturePrior
from fedsim.attacks.matching.priors import running_statistics
from fedsim.core.anatomy import head_names
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import Update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.staging import CPU, attack, observe, photos

RESNET = ModelSpec(
    name="resnet18",
    options={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8},
)


def resnet() -> torch.nn.Module:
    return build_model(RESNET, image_size=32, num_classes=8, seed=0)


def test_its_loss_is_the_cross_entropy_and_the_distance_of_the_statistics() -> None:
    model = resnet().eval()
    prior = FeaturePrior(running_statistics(model), 0.5)
    images, labels = torch.randn(2, 3, 3, 32, 32), torch.tensor([[1, 2, 3]]).expand(2, -1)
    match = Classified(model, prior)(images, labels)
    for seed in range(2):
        with prior.listening(model):
            logits = model(images[seed])
            by_hand = F.cross_entropy(logits, labels[seed]) + prior.penalty()
        assert torch.allclose(match.value[seed], by_hand.detach(), rtol=1e-5)
    step = 1e-2 * match.images / match.images.flatten(1).norm(dim=1).view(2, 1, 1, 1, 1)
    assert (Classified(model, prior).value(images - step, labels) < match.value).all()


def test_of_the_update_it_takes_the_labels_alone() -> None:
    images, labels = photos(32, [70, 20])
    observation = observe(RESNET, images, labels, TrainSpec(batch_size=2))
    options = {"steps": 8, "engine": "first_order"}
    found = attack(observation, "deep_inversion", resnet, **options)
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())
    assert any("no gradient is matched" in note for note in found.notes)
    head = head_names(resnet())
    blind: Update = replace(
        observation.update,
        tensors={
            name: tensor if name in head else torch.randn_like(tensor)
            for name, tensor in observation.update.tensors.items()
        },
    )
    again = attack(replace(observation, update=blind), "deep_inversion", resnet, **options)
    assert torch.equal(found.images, again.images)


def test_the_model_takes_its_pictures_for_their_labels() -> None:
    images, labels = photos(32, [70, 20])
    view = View(
        observe(RESNET, images, labels, TrainSpec(batch_size=2)),
        THREATS["B"].grants,
        Announced(resnet),
    )
    deep = create_attack("deep_inversion", steps=120, bn=0.0, tv=0.0)
    from fedsim.core.attack import no_progress

    found = deep.reconstruct(view, device=CPU, progress=no_progress)
    logits = resnet().eval()((found.images - 0.5) / 0.5)
    assert logits.argmax(1).tolist() == found.labels.tolist()
