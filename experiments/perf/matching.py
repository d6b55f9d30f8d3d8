"""What one matching step costs, against one plain forward and backward of the same model and batch.

    python experiments/perf/matching.py [--rounds 20] [--device cpu]

Interleaved in one process, so that a busy machine slows all alike; the ratio of a round is that of
its own times, and the median over rounds is shown. Memory is the peak of a fresh process above what
it held before its first step. Then eight seeds as one batch (vmap) against eight one after the
other.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.matching.matcher import GradientMatcher, Way
from fedsim.attacks.matching.objectives import Cosine, Target


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    options: dict[str, Any]
    side: int
    batch: int


CASES = [
    Case("vit_tiny@224 b1", "vit_tiny_patch16_224", {}, 224, 1),
    Case("vit_32px b4", "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}, 32, 4),
    Case("resnet18@64 b4", "resnet18", {}, 64, 4),
]
SEEDS = Case("vit_32px b1", "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}, 32, 1)


@dataclass
class Bench:
    """A model, a target made by one batch, and the images of another to start from."""

    model: nn.Module
    target: Target
    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, case: Case, device: torch.device, seeds: int = 1) -> Bench:
        torch.manual_seed(0)
        model = timm.create_model(case.model, num_classes=10, **case.options).to(device).train()
        shape = (case.batch, 3, case.side, case.side)
        labels = torch.arange(case.batch, device=device)
        loss = F.cross_entropy(model(torch.randn(shape, device=device)), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        target = Target(dict(zip(names, gradients, strict=True)))
        images = torch.randn(seeds, *shape, device=device)
        return cls(model, target, images, labels.expand(seeds, -1))

    def matcher(self, way: Way) -> GradientMatcher:
        return GradientMatcher(copy.deepcopy(self.model), self.target, Cosine(), way=way)

    def plain(self) -> None:
        loss = F.cross_entropy(self.model(self.images[0]), self.labels[0])
        torch.autograd.grad(loss, list(self.model.parameters()))


def timed(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ratios(
    works: dict[str, Callable[[], object]], base: str, rounds: int, device: torch.device
) -> dict[str, float]:
    """The median over rounds of each work's time over the base's in the same round."""
    for work in works.values():
        work()
        work()
    quotients: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        seconds = {name: timed(work, device) for name, work in works.items()}
        for name in works:
            quotients[name].append(seconds[name] / seconds[base])
    return {name: statistics.median(values) for name, values in quotients.items()}


def peak(case: Case, way: Way, device_name: str, out: Any) -> None:
    """The peak memory of three steps above what the process held before, in MB."""
    device = torch.device(device_name)
    bench = Bench.of(case, device)
    matcher = bench.matcher(way)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
        before = _status("VmRSS")
    for _ in range(3):
        matcher(bench.images, bench.labels)
    after = torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")
    out.put((after - before) / 2**20)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def in_a_fresh_process(case: Case, way: Way, device: torch.device) -> float:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=peak, args=(case, way, str(device), out))
    process.start()
    result = float(out.get(timeout=300))
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)

    for case in CASES:
        bench = Bench.of(case, device)
        fast, reference = bench.matcher("first_order"), bench.matcher("double")
        a, b = (m(bench.images, bench.labels).images.flatten() for m in (fast, reference))
        cosine = float(F.cosine_similarity(a.double(), b.double(), dim=0))
        works: dict[str, Callable[[], object]] = {
            "plain": bench.plain,
            "first_order": partial(fast, bench.images, bench.labels),
            "double": partial(reference, bench.images, bench.labels),
        }
        costs = ratios(works, "plain", options.rounds, device)
        print(
            f"{case.name}: first_order {costs['first_order']:.2f}x, double {costs['double']:.2f}x",
            flush=True,
        )
        memory = {w: in_a_fresh_process(case, w, device) for w in ("first_order", "double")}
        print(
            f"  cosine {cosine:.6f}; peak memory first_order {memory['first_order']:.0f} MB, "
            f"double {memory['double']:.0f} MB",
            flush=True,
        )

    bench = Bench.of(SEEDS, device, seeds=8)
    matcher = bench.matcher("first_order")

    def one_by_one() -> None:
        for seed in range(len(bench.images)):
            matcher(bench.images[seed : seed + 1], bench.labels[seed : seed + 1])

    works = {
        "one by one": one_by_one,
        "vmap": lambda: matcher.batched(bench.images, bench.labels),
        "as the search does": lambda: matcher(bench.images, bench.labels),
    }
    costs = ratios(works, "one by one", max(3, options.rounds // 2), device)
    print(
        f"8 seeds, {SEEDS.name}: as one batch (vmap) {1 / costs['vmap']:.2f}x the speed of one by "
        f"one; as the search does on this device {1 / costs['as the search does']:.2f}x"
    )


if __name__ == "__main__":
    main()
