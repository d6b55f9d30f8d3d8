"""Fig. A3 of GIAS: four of a client's eight pictures behind every update."""

from __future__ import annotations

import numpy as np
import torch

from experiments.joint import Setting, attacked, draw, observations
from fedsim.clients.data import load_images
from fedsim.core.learning import local_update
from fedsim.core.observation import Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec

DATA = DataSpec(name="photos", image_size=16)
MODEL = ModelSpec(name="convnet", options={"channels": [4, 6]})


def test_every_update_is_of_its_own_draw_and_the_last_ones_pictures_are_found() -> None:
    pictures = load_images(DATA, "train")
    classes = len(pictures.classes)
    public = Public.of(Spec(data=DATA, model=MODEL, train=TrainSpec(batch_size=2)), classes)
    setting = Setting(DATA, MODEL, classes, public)
    rows = [int(np.flatnonzero(pictures.labels == c)[0]) for c in range(4)]
    images = torch.stack([pictures.image(row) for row in rows])
    labels = torch.tensor(pictures.labels[rows])
    drawn = draw(np.random.default_rng(0), 4, 2, 6)
    assert all(len(set(some.tolist())) == 2 for some in drawn)
    assert len({tuple(sorted(some.tolist())) for some in drawn}) > 1
    updates = list(observations(setting, images, labels, True, drawn))
    for number, (observation, some) in enumerate(zip(updates, drawn, strict=True), start=1):
        batch = [(images[some], labels[some])]
        wanted = local_update(setting.net(number), batch, public.protocol)
        for name, tensor in wanted.tensors.items():
            torch.testing.assert_close(observation.update.tensors[name], tensor)
    assert attacked(setting, updates, 3, 2, 0.01).shape == (2, 3, 16, 16)
