"""Inverter: a network learned on simulated clients, from their updates to their pictures.

After Wu et al. 2023, "Learning to Invert". The attacker has pictures of its own, knows the weights
that were sent and how clients train and defend themselves; so it makes as many pairs of update and
pictures as it likes, and learns the way back by squared error. Where a defense leaves too little to
match, what is left may still tell a network that has seen the like. Nothing is matched or searched
when it attacks.

The network belongs to the weights of one round: every attacked round is learned anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsim.attacks.giml import draw_samples
from fedsim.attacks.inverting import (
    MOST_PICTURES,
    Course,
    Example,
    Inversion,
    Layout,
    Rehearsal,
    Sketch,
    Training,
    batch_of,
    in_order,
    read_labels,
    shrunk,
)
from fedsim.attacks.matching import Count, Rate, Weight
from fedsim.core.attack import Attack, Lesson, Progress, Reconstruction
from fedsim.core.augment import mixes
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Traffic, View
from fedsim.core.learning import digest
from fedsim.core.notebook import Notebook
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Spec, Upload

_FEWEST = 8  # surrogate pictures
_EXAMINED = 256  # held-out pictures, at most
_SHOWN = 8  # of them in samples.png


@dataclass(frozen=True, kw_only=True)
class Inverter(Attack):
    """``clients`` are simulated, their updates sketched in about ``entries`` numbers, and a network
    of this ``width`` learns from them in ``epochs`` of batches of ``batch``, at ``lr`` with weight
    ``decay`` and ``dropout``. ``held_out``: the share of the surrogate pictures by which it is
    examined. ``adaptive``: the simulated clients defend themselves as declared.
    """

    learns_from: ClassVar[str] = "surrogate"
    needs: ClassVar[frozenset[str]] = frozenset(
        {
            *("update", "weights", "architecture", "image_size", "normalisation", "batch_size"),
            *("optimizer", "learning_rate", "local_steps", "surrogate"),
        }
    )
    uses: ClassVar[frozenset[str]] = frozenset({"defenses"})

    clients: Count = 16384
    entries: Count = 4096
    width: Count = 512
    epochs: Count = 8
    batch: Count = 128
    lr: Rate = 1e-3
    decay: Weight = 0.1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    adaptive: bool = True

    def check_spec(self, spec: Spec) -> None:
        train = spec.train
        if spec.threat.surrogate is None:
            raise AttackError(
                "the inverter learns from pictures of the attacker's own; say where they are: "
                "threat.surrogate.name, threat.surrogate.path."
            )
        if spec.server.manoeuvre is not None:
            raise AttackError(
                "the inverter learns a network for the weights of a round, and this server may "
                "send every client its own."
            )
        delta = train.upload is Upload.DELTA
        if delta and train.local_epochs:
            raise AttackError(_EPOCHS)
        _refuse_many(train.step_size * ((train.local_steps or 1) if delta else 1))
        if mixes([one.model_dump() for one in train.augment]):
            raise AttackError(_MIXED)

    # -- learning -----------------------------------------------------------------------------

    @property
    def learner(self) -> str:
        """Inverters that learn alike share one memory."""
        learning = {f.name: repr(getattr(self, f.name)) for f in fields(self)}
        content = json.dumps(learning, sort_keys=True).encode()
        return f"inverter-{hashlib.sha256(content).hexdigest()[:8]}"

    @property
    def course(self) -> Course:
        names = (f.name for f in fields(Course))
        return Course(**{name: getattr(self, name) for name in names})

    def lessons_before(self, rounds: int) -> int:
        return 1  # that of the round it attacks

    def learn(
        self,
        traffic: Traffic,
        lesson: int,
        memory: Path,
        *,
        seed: int,
        device: torch.device,
        progress: Progress,
    ) -> Lesson:
        """The network for the weights of one round, from where the memory left off."""
        if not len(traffic):
            return Lesson(notes=["nothing was observed in this round"])
        view = traffic.open(*traffic.addresses[0])
        layout = _layout(view)
        learned, kept = _split(view.surrogate, self.held_out, layout.pictures, seed)
        seed = seed_from(f"{seed} round {view.round}")
        rehearsal = Rehearsal(
            *(view, learned, layout),
            entries=self.entries,
            seed=seed,
            device=device,
            defended=self.adaptive,
        )
        about = {
            "learner": self.learner,
            "seed": seed,
            "weights": digest(view.weights),
            "surrogate": digest({"pictures": view.surrogate}),
        }
        page = _page(memory, view.round)
        training = Training(self.course, rehearsal, page.page("draft").path, about, seed)
        net = training.run(progress)
        others = rehearsal.on(kept, "held out")
        unseen = batch_of([others.example(n) for n in range(len(kept) // layout.pictures)])
        exam = net.examine(unseen)
        words = (
            f"learned from {self.clients} simulated clients on {len(learned)} surrogate pictures; "
            f"{exam.words}"
        )
        _draw(net, unseen, memory)
        page.save(
            net.state_dict(),
            {
                **about,
                **{"shape": net.shape, "sizes": rehearsal.sketch.sizes},
                **{"error": exam.error, "words": words},
            },
        )
        training.clear()
        return Lesson(
            steps=self.course.steps, losses=training.losses, notes=[f"round {view.round}: {words}"]
        )

    # -- attacking with what it learned -------------------------------------------------------

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if view.memory is None:
            raise AttackError("the inverter attacks only after it has learned, in an audit.")
        kept = _page(view.memory, view.round).load()
        if kept is None:
            raise AttackError(f"the inverter has learned no network for round {view.round}.")
        tensors, about = kept
        if digest(view.weights) != about["weights"]:
            raise AttackError(
                "this client was sent other weights than those that the network was learned for."
            )
        layout, model, update = _layout(view), view.model().to(device), view.update
        if layout.pictures != about["shape"]["pictures"]:
            raise AttackError(
                f"{layout.pictures} pictures stand behind this update, and the network was learned "
                f"for {about['shape']['pictures']}."
            )
        net = Inversion(**about["shape"]).to(device).eval()
        net.load_state_dict(tensors)
        sketch = Sketch(about["sizes"], self.entries, about["seed"])
        notes = [about["words"]]
        if lacking := sketch.lacking(update):
            notes.append(f"taken for zeros, because they were not uploaded: {', '.join(lacking)}")
        labels = read_labels(view, model, update, layout)
        seen = labels if labels is not None else torch.full((layout.pictures,), -1)
        nothing = torch.empty(1, layout.pictures, 0)
        example = Example(sketch(update).half()[None], nothing, nothing, seen[None])
        images = net.pictures(example)[0].cpu()
        progress(1, 1, about["error"])
        return Reconstruction(images=images, labels=labels, loss=about["error"], notes=notes)


_EPOCHS = "the inverter simulates local steps, not epochs over all that a client holds."
_MIXED = "the inverter tells no mixed pictures apart (MixUp, CutMix)."


def _layout(view: View) -> Layout:
    """How many pictures stand behind an update; declines what is not simulated."""
    protocol = view.protocol()
    if mixes(protocol.augment):
        raise AttackError(_MIXED)
    steps, epochs = view.local_steps
    if protocol.upload is Upload.GRADIENT:
        steps, epochs = 1, None
    if epochs:
        raise AttackError(_EPOCHS)
    layout = Layout(view.batch_size, steps or 1)
    _refuse_many(layout.pictures)
    return layout


def _refuse_many(pictures: int) -> None:
    if pictures > MOST_PICTURES:
        raise AttackError(
            f"the inverter tells up to {MOST_PICTURES} pictures apart, and {pictures} stand behind "
            f"an update."
        )


def _split(surrogate: Tensor, share: float, pictures: int, seed: int) -> tuple[Tensor, Tensor]:
    """The pictures that are learned from, and those that are held out."""
    if len(surrogate) < max(_FEWEST, 2 * pictures):
        raise AttackError(
            f"{len(surrogate)} surrogate pictures are too few to learn from; give the attacker at "
            f"least {max(_FEWEST, 2 * pictures)}."
        )
    coin = torch.Generator().manual_seed(seed_from(f"{seed} held out"))
    order = torch.randperm(len(surrogate), generator=coin)
    count = min(_EXAMINED, max(pictures, round(share * len(surrogate))))
    return surrogate[order[count:]], surrogate[order[:count]]


def _page(memory: Path, round_: int) -> Notebook:
    return Notebook(memory / f"round-{round_:04d}.safetensors")


def _draw(net: Inversion, unseen: Example, memory: Path) -> None:
    """Held-out pictures, and below them what the network makes of their clients' updates."""
    told = net.pictures(unseen).cpu()
    told = shrunk(told.flatten(0, 1)).unflatten(0, told.shape[:2])
    truth = in_order(told, unseen.pictures.float(), unseen)
    rows = torch.stack([truth.flatten(0, 1)[:_SHOWN], told.flatten(0, 1)[:_SHOWN]])
    draw_samples((rows * 255).round().to(torch.uint8), memory / "samples.png")
