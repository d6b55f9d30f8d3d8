"""What one meta-step of GIML costs over the matching steps it is made of.

    python experiments/perf/giml.py [--rounds 5]

A meta-step is tasks x task_steps searches of latents and tasks x shared_steps passes of the
weights; around them it opens observations, recovers labels, builds models, keeps the best latents
and writes its state. Both are timed in one process, in turns: the whole meta-step as the workers
run it, and the same number of bare steps (generator, matching, backward, Adam) on tasks that are
ready. The ratio of a round is that of its own times; the median is shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fedsim.attacks.generators import generate
from fedsim.attacks.gias import draw_latents
from fedsim.attacks.giml import Giml, MetaLearner
from fedsim.attacks.matching import Task
from fedsim.attacks.matching.priors import total_variation
from fedsim.audit.stages import federate
from fedsim.campaign.jobs import Handout, traffic_of
from fedsim.core.spec import load_spec

SPEC = {
    "data": {"name": "photos", "image_size": 32, "clients": 8},
    "model": {"name": "convnet"},
    "train": {"rounds": 1, "batch_size": 4, "evaluate": False},
    "attacks": [{"name": "giml"}],
    "engine": {"kind": "inline", "device": "cpu"},
}


def bare(state: MetaLearner, tasks: list[Task]) -> float:
    """Seconds of the matching steps alone."""
    attack, net = state.attack, state.net
    began = time.perf_counter()
    for task in tasks:
        z = draw_latents(net, 1, task.problem.count, torch.Generator().manual_seed(0))
        z = z.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([z], lr=attack.task_lr)
        for _ in range(attack.task_steps):
            images = task.problem.normalised(generate(net, z.flatten(0, 1)))[None]
            match = task.matcher(images.detach(), task.labels)
            tv = attack.tv * total_variation(images).sum()
            z.grad = None
            torch.autograd.backward([images, tv], [match.images, None], inputs=[z])
            optimizer.step()
    net.requires_grad_(True)
    before = [weight.detach().clone() for weight in state.weights]
    optimizer = torch.optim.Adam(state.weights, lr=1e-9)
    for _ in range(attack.shared_steps):
        optimizer.zero_grad(set_to_none=True)
        for task in tasks:
            z = draw_latents(net, 1, task.problem.count, torch.Generator().manual_seed(0))
            images = task.problem.normalised(generate(net, z.flatten(0, 1)))[None]
            match = task.matcher(images.detach(), task.labels)
            tv = attack.tv * total_variation(images).sum()
            torch.autograd.backward([images, tv], [match.images, None])
        optimizer.step()
    seconds = time.perf_counter() - began
    net.requires_grad_(False)
    with torch.no_grad():
        for weight, old in zip(state.weights, before, strict=True):
            weight.copy_(old)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = load_spec(SPEC)
        run = federate(spec, Path(folder) / "run")
        traffic = traffic_of(run.observations, Handout(spec.threat, 0, "cpu"), 1, seed=0)
        attack = Giml(options={"width": 24})
        state = MetaLearner(attack, traffic, Path(folder) / "memory", 0, torch.device("cpu"))
        coin = torch.Generator().manual_seed(0)
        state.meta_step()  # asks which derivative to trust, once
        tasks = state._tasks(coin)
        bare(state, tasks)
        ratios, whole, parts = [], [], []
        for _ in range(options.rounds):
            began = time.perf_counter()
            state.meta_step()
            whole.append(time.perf_counter() - began)
            parts.append(bare(state, tasks))
            ratios.append(whole[-1] / parts[-1])
    steps = attack.tasks * (attack.task_steps + attack.shared_steps)
    print(
        f"convnet 32 px b4, {attack.tasks} tasks: one meta-step {statistics.median(ratios):.2f}x "
        f"its {steps} matching steps ({statistics.median(whole):.2f} s, "
        f"{1000 * statistics.median(parts) / steps:.1f} ms a step)"
    )


if __name__ == "__main__":
    main()
