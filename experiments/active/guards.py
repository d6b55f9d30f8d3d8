"""What guards notice: of honest rounds nothing, of fished ones all.

    python experiments/active/guards.py [honest] [tampered] [cost] [--seed 4000]

``honest``: the scores of honest client-rounds, of fresh and of trained models, and how many of them
would have been taken for an attack. ``tampered``: what each guard makes of tampered weights, at
full strength and gentler, in a client's first round and in a later one. ``cost``: how long each
guard takes, as a multiple of the client's own training step.

The limits come from other pictures (CIFAR-10), other seeds (0 to 2) and, for the ViTs, another
depth: `fedsim.defenses.guards.calibration`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from experiments.active import tampered
from experiments.active.honest import Federation, first_batch, pictures_of, scenes, start_of
from fedsim.core.guard import Guard, Scene
from fedsim.core.learning import Batch, local_update
from fedsim.core.spec import Upload
from fedsim.defenses.guards import create_guard
from fedsim.defenses.guards.d_snr import gradient_norms
from fedsim.defenses.guards.same_model import notice_of

Tamper = Callable[[nn.Module, Batch, torch.Generator], None]
NAMES = ("d_snr", "weight_check", "loss_jump", "same_model")
VIT8 = Federation(options={"patch_size": 8})
VIT4 = Federation(options={"patch_size": 4}, rounds=2)
VIT16 = Federation(size=160, rounds=2)
RESNET, CONVNET = Federation(name="resnet18"), Federation(name="convnet")


def honest_federations() -> Iterator[Federation]:
    """Fresh and trained; batches of 2 to 64; labels drawn alike, or two or one a client."""
    for batch in (2, 4, 8, 16, 64):
        for labels in ("iid", "skewed"):
            yield replace(CONVNET, batch=batch, labels=labels, lr=0.1, rounds=2)
            yield replace(CONVNET, batch=batch, labels=labels, trained=150, lr=0.02, rounds=2)
    yield replace(CONVNET, batch=8, labels="single", upload=Upload.DELTA, steps=4)
    yield replace(CONVNET, batch=8, labels="single", trained=150, upload=Upload.DELTA, steps=4)
    for batch in (2, 4, 8, 16):
        labels = "skewed" if batch in (4, 16) else "iid"
        for trained in (0, 60):
            yield replace(RESNET, batch=batch, labels=labels, trained=trained, rounds=2)
            yield replace(VIT8, batch=batch, labels=labels, trained=trained, lr=0.02, rounds=2)
    yield replace(
        VIT8, batch=4, trained=60, labels="skewed", rounds=2, upload=Upload.DELTA, steps=4
    )
    yield replace(VIT4, batch=4, labels="skewed")
    yield replace(VIT16, batch=4)


def honest(seed: int) -> None:
    """Scores of honest rounds, and false alarms."""
    guards = [create_guard(name) for name in NAMES[:3]]
    shares: dict[str, dict[str, list[float]]] = {}
    fired: dict[str, int] = dict.fromkeys(NAMES, 0)
    total = alarmed = 0
    for federation in honest_federations():
        kind = "trained" if federation.trained else "fresh"
        for scene in scenes(federation, seed, guards):
            found = [guard.inspect(scene) for guard in guards]
            # everybody received the same, and says so
            everyone = replace(scene, notices={client: notice_of(scene) for client in range(3)})
            found.append(create_guard("same_model").inspect(everyone))
            for finding in found:
                share = finding.score / finding.limit if finding.limit else finding.score
                key = f"{finding.guard}, {kind}"
                shares.setdefault(key, {}).setdefault(str(federation.batch), []).append(share)
                if finding.fired:
                    fired[finding.guard] += 1
                    where = f"{federation.title}, {federation.labels}, batch {federation.batch}"
                    print(f"false alarm: {where}, round {scene.round}: {finding.words}")
            total += 1
            alarmed += any(finding.fired for finding in found)
    print(f"\nHonest client-rounds: {total} (seed {seed}). Scores as shares of the limit.\n")
    print("| guard, model | rounds | median | 95 % | 99 % | largest |\n|---|---|---|---|---|---|")
    for key, by_batch in shares.items():
        values = np.array([value for values in by_batch.values() for value in values])
        middle, high, higher = np.quantile(values, [0.5, 0.95, 0.99])
        numbers = (middle, high, higher, values.max())
        print(f"| {key} | {len(values)} | {' | '.join(f'{number:.2g}' for number in numbers)} |")
    print(f"\nFalse alarms: {alarmed} of {total} ({alarmed / total:.1%}); {fired}\n")


def attacks() -> dict[str, Tamper]:
    """Every tampering, by its name and strength."""
    found: dict[str, Tamper] = {}

    def fished(gap: float) -> Tamper:
        return lambda m, batch, coin: tampered.class_fishing(m, int(batch[1][0]), coin, gap)

    def by_feature(sharp: float) -> Tamper:
        def tamper(m: nn.Module, batch: Batch, coin: torch.Generator) -> None:
            normal = VIT8.protocol.normalise(batch[0])
            tampered.feature_fishing(m, int(batch[1][0]), normal, coin, sharp, rank=1)

        return tamper

    def blended(share: float, tamper: Tamper) -> Tamper:
        return lambda m, b, coin: tampered.blended(m, share, lambda same: tamper(same, b, coin))

    for gap in (1000.0, 30.0, 10.0):
        found[f"class fishing, gap {gap:g}"] = fished(gap)
    found["class fishing, within the limits"] = lambda m, batch, coin: tampered.quiet_fishing(
        m, int(batch[1][0]), coin, gap=9, part=0.12
    )
    for share in (0.5, 0.1):
        found[f"class fishing, {share:.0%} of it"] = blended(share, fished(1000))
    for sharp in (1000.0, 100.0, 20.0):
        found[f"feature fishing, sharp {sharp:g}"] = by_feature(sharp)
    found["feature fishing, 50% of it"] = blended(0.5, by_feature(1000))
    for scale in (0.0, 1e-3, 1e-1):
        found[f"head times {scale:g}"] = lambda m, b, c, s=scale: tampered.weak_head(m, s)  # type: ignore[misc]
    for sharp, quiet in ((3e4, 1e-12), (30.0, 1e-4)):
        name = f"imprint, sharp {sharp:g}"
        found[name] = lambda m, b, c, s=sharp, q=quiet: tampered.imprint(m, c, s, q)  # type: ignore[misc]
    for share in (0.5, 0.1):
        found[f"imprint, {share:.0%} of it"] = blended(share, found["imprint, sharp 30"])
    return found


def isolated(scene: Scene) -> float:
    """The share of the first layer's gradient norms that one picture has."""
    images, labels = scene.batches[0]
    norms, _ = gradient_norms(scene.model, scene.protocol.normalise(images), labels)
    first = next(iter(norms.values()))
    return float(first.max() / first.sum()) if first.sum() > 0 else 0.0


def tampering(seed: int) -> None:
    """What each guard says of tampered weights: its score by its limit, marked where it fires."""
    guards = [create_guard(name) for name in NAMES[:3]]
    same = create_guard("same_model")
    print(f"Tampered rounds (seed {seed}): scores as shares of the limit, **bold** where it fires.")
    print("'later': with what was kept of an honest round before. 'alone': the largest picture's")
    print(
        "share of the first layer's gradient norms. 'noticed alone': without talking to others.\n"
    )
    print(f"| model | batch | round | attack | alone | {' | '.join(NAMES)} | noticed alone |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    cells = [(VIT8, 8), (replace(VIT8, trained=60), 16), (CONVNET, 8), (RESNET, 64)]
    for federation, batch in cells:
        for name, tamper in attacks().items():
            if name.startswith("imprint") and federation.name != VIT8.name:
                continue
            for later in (True,) if federation.trained else (False, True):
                scene = _tampered_scene(federation, batch, name, tamper, later, guards, seed)
                found = [guard.inspect(scene) for guard in guards]
                words = []
                for finding in [*found, same.inspect(scene)]:
                    share = finding.score / finding.limit if finding.limit else finding.score
                    words.append(f"**{share:.2g}**" if finding.fired else f"{share:.2g}")
                noticed = "yes" if any(finding.fired for finding in found) else "no"
                when, alone = "later" if later else "first", isolated(scene)
                cell = f"{federation.title} | {batch} | {when} | {name} | {alone:.2f}"
                print(f"| {cell} | {' | '.join(words)} | {noticed} |", flush=True)


def _tampered_scene(
    federation: Federation, size: int, name: str, tamper: Tamper, later: bool, guards: list[Guard],
    seed: int,
) -> Scene:  # fmt: skip
    """A client before tampered weights, who was sent honest ones before, if it is ``later``."""
    model = start_of(federation, seed)
    batch = first_batch(federation, seed, size)
    if name.startswith("feature"):  # of one label alone
        pictures, labels = pictures_of(federation.data, federation.path, federation.size)
        rows = (labels == batch[1][0]).nonzero()[:size, 0]
        batch = (pictures[rows], labels[rows])
    scene = Scene(1, 0, model, [batch], federation.protocol)
    others = notice_of(scene)
    kept = {n: t for guard in guards for n, t in guard.keep(scene).items()} if later else {}
    tamper(model, batch, torch.Generator().manual_seed(seed))
    return replace(scene, round=2 if later else 1, kept=kept, notices={1: others, 2: others})


def cost(seed: int) -> None:
    """Each guard's time in a round, inspecting and keeping, as a multiple of a training step."""
    print("| model | batch | training step | d_snr | weight_check | loss_jump | same_model |")
    print("|---|---|---|---|---|---|---|")
    cells = [(VIT8, 8), (VIT8, 64), (VIT4, 8), (VIT16, 8), (RESNET, 8), (RESNET, 64), (CONVNET, 8)]
    for federation, size in cells:
        model = start_of(federation, seed)
        scene = Scene(1, 0, model, [first_batch(federation, seed, size)], federation.protocol)
        guards = [create_guard(name) for name in NAMES]
        scene = replace(scene, notices={1: notice_of(scene)})
        scene = replace(scene, kept={n: t for g in guards for n, t in g.keep(scene).items()})
        times: dict[str, list[float]] = {}
        for _ in range(5):  # in turn, so that a busy machine slows all alike
            _timed(times, "step", lambda s=scene: local_update(s.model, s.batches, s.protocol))  # type: ignore[misc]
            for name, guard in zip(NAMES, guards, strict=True):
                _timed(times, name, lambda g=guard, s=scene: (g.inspect(s), g.keep(s)))  # type: ignore[misc]
        step = statistics.median(times["step"][1:])
        ratios = [f"{statistics.median(times[name][1:]) / step:.2f}" for name in NAMES]
        print(f"| {federation.title} | {size} | {step * 1e3:.0f} ms | {' | '.join(ratios)} |",
              flush=True)  # fmt: skip


def _timed(times: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    times.setdefault(name, []).append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["honest", "tampered", "cost"])
    parser.add_argument("--seed", type=int, default=4000)
    asked = parser.parse_args()
    parts = {"honest": honest, "tampered": tampering, "cost": cost}
    for part in asked.parts:
        if part not in parts:
            parser.error(f"there is no part '{part}'; choose from {', '.join(parts)}")
        parts[part](asked.seed)


if __name__ == "__main__":
    main()
