"""What guards notice: of honest rounds nothing, of fished ones all.

    python -m experiments.active.guards [honest] [tampered] [cost] [--seed 4000]

``honest``: the scores of honest client-rounds, of fresh and of trained models, and how many of them
would have been taken for an attack. ``tampered``: what each guard makes of what the manoeuvres
send, at full strength and gentler, in a client's first round and in a later one. ``cost``: how long
each guard takes, as a multiple of the client's own training step.

The limits come from other pictures (CIFAR-10), other seeds (0 to 2) and, for the ViTs, another
depth: `fedsim.defenses.guards.calibration`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from experiments.active.honest import Federation, first_batch, pictures_of, scenes, start_of
from experiments.active.server import Server, best_match
from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.core.guard import Guard, Scene
from fedsim.core.learning import Batch, local_update
from fedsim.core.spec import ModelSpec, TrainSpec, Upload
from fedsim.defenses.guards import create_guard
from fedsim.defenses.guards.same_model import notice_of

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


@dataclass(frozen=True)
class Sent:
    """A manoeuvre by its name, and whom its weights are shown to: the victim, or one beside it."""

    words: str
    manoeuvre: str
    params: dict[str, Any] = field(default_factory=dict)
    one_class: bool = False
    beside: bool = False
    layer: bool = False

    @property
    def attack(self) -> str | None:
        """What reads the update; what those beside a victim send is read by nobody."""
        if self.beside:
            return None
        return self.manoeuvre if self.manoeuvre.startswith("imprint") else "patch_solve"


def sent() -> Iterator[Sent]:
    """Every manoeuvre, and those that have a strength gentler as well."""
    for strength in (1.0, 0.5, 0.2, 0.1, 0.05):
        params = {"strength": strength}
        yield Sent(f"class fishing, strength {strength:g}", "fishing", params)
    for strength in (1.0, 0.5, 0.1):
        gated: dict[str, Any] = {"strength": strength, "kind": "feature"}
        yield Sent(f"feature fishing, strength {strength:g}", "fishing", gated, one_class=True)
    lure = {"lure": {"name": "fishing"}}
    yield Sent("inconsistent, the victim fished", "inconsistent", lure)
    yield Sent("inconsistent, those beside", "inconsistent", lure, beside=True)
    yield Sent("imprint", "imprint", one_class=True)
    yield Sent("imprint_layer", "imprint_layer", layer=True)


def tampering(seed: int) -> None:
    """What each guard says of tampered weights: its score by its limit, marked where it fires."""
    guards = [create_guard(name) for name in NAMES[:3]]
    same = create_guard("same_model")
    print(f"Tampered rounds (seed {seed}): scores as shares of the limit, **bold** where it fires.")
    print("'later': with what was kept of an honest round before. 'leak': the best PSNR of the")
    print("batch by the closed form that reads it. 'noticed alone': without talking to others.\n")
    print(f"| model | batch | round | sent | leak, dB | {' | '.join(NAMES)} | noticed alone |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    noticed: Counter[str] = Counter()
    cells = [(VIT8, 8), (replace(VIT8, trained=60), 16), (CONVNET, 8), (RESNET, 16)]
    for federation, size in cells:
        for what in sent():
            if what.manoeuvre == "imprint" and federation.name != VIT8.name:
                continue
            for later in (True,) if federation.trained else (False, True):
                scene, leak = _tampered_scene(federation, size, what, later, guards, seed)
                found = [guard.inspect(scene) for guard in guards]
                words = []
                for finding in [*found, same.inspect(scene)]:
                    share = finding.score / finding.limit if finding.limit else finding.score
                    words.append(f"**{share:.2g}**" if finding.fired else f"{share:.2g}")
                alarm = any(finding.fired for finding in found)
                noticed[what.words] += alarm
                noticed[f"{what.words}: rounds"] += 1
                when = "later" if later else "first"
                cell = f"{federation.title} | {size} | {when} | {what.words} | {leak}"
                end = "yes" if alarm else "no"
                print(f"| {cell} | {' | '.join(words)} | {end} |", flush=True)
    print()
    for what in sent():
        rounds = noticed[f"{what.words}: rounds"]
        print(f"{what.words}: {noticed[what.words]} of {rounds} rounds noticed alone")


def _tampered_scene(
    federation: Federation, size: int, what: Sent, later: bool, guards: list[Guard], seed: int
) -> tuple[Scene, str]:
    """A client before tampered weights, who was sent honest ones before if it is ``later``; and
    how much of its batch they gave away."""
    options = {"imprint_layer": 32} if what.layer else {}
    federation = replace(federation, options={**federation.options, **options})
    model = start_of(federation, seed)
    pictures, labels = pictures_of(federation.data, federation.path, federation.size)
    batch = first_batch(federation, seed, size)
    if what.one_class:
        rows = (labels == batch[1][0]).nonzero()[:size, 0]
        batch = (pictures[rows], labels[rows])
    target = {"target": int(batch[1][0])}
    params = dict(what.params)
    if what.manoeuvre == "inconsistent":
        params |= {"victim": 0, "lure": {**params["lure"], **target}}
    elif what.manoeuvre == "fishing":
        params |= target
    train = TrainSpec(batch_size=size, mode="train", lr=federation.lr)
    spec = ModelSpec(name=federation.name, options=federation.options)
    server = Server(
        manoeuvre=create_manoeuvre(what.manoeuvre, **params),
        model=spec,
        side=federation.size,
        classes=int(labels.max()) + 1,
        train=train,
        weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    scene = Scene(1, 0, model, [batch], federation.protocol)
    others = notice_of(scene)
    kept = {n: t for guard in guards for n, t in guard.keep(scene).items()} if later else {}
    cohort, client = range(2), 1 if what.beside else 0
    model.load_state_dict({**server.weights, **server.sent(1, client, cohort).changed})
    leak = _leak(server, what, batch, federation)
    scene = replace(scene, round=2 if later else 1, kept=kept, notices={1: others, 2: others})
    return scene, leak


def _leak(server: Server, what: Sent, batch: Batch, federation: Federation) -> str:
    """The best PSNR of a picture of the batch; empty where no closed form reads this model."""
    if what.attack is None or (what.attack == "patch_solve" and federation.name != VIT8.name):
        return ""
    seen = server.round([[batch], [batch]])[0]
    if what.attack != "patch_solve":
        return f"{best_match(server.read(seen, what.attack), batch[0]):.0f}"
    isolated = server.isolated(seen)
    if isolated.pictures == 0:
        return "none"
    found = server.solved(seen, replace(isolated, pictures=1), snap=False)
    return f"{best_match(found, batch[0]):.0f}"


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
