"""Joint inversion (Jeon et al. 2021, Appendix D): one client's images from several rounds at once.

Minimises sum_t cost(x; theta_t, g_t) over the images that stand behind a client's updates. Which
update saw which image is told by the recovered labels: images of one class are taken to be the same
ones in every round. Each round adds equations for the same unknowns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.attacks.inverting_gradients import InvertingGradients
from fedsim.attacks.matching import Count, Match, Matching, Task
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View


@dataclass(frozen=True, kw_only=True)
class Joint(InvertingGradients):
    """``rounds``: how many of the client's updates are used, this one and those before it; all by
    default. The result holds the images of this update alone."""

    rounds: Count | None = None

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"traffic"}

    def refuse_labels(self) -> None:
        if self.labels == "joint":
            raise AttackError("joint inversion tells images apart by their labels; recover them.")
        if self.order == "free":
            raise AttackError("joint inversion has one order for the pictures of all rounds.")

    def task(self, view: View, device: torch.device) -> Task:
        self.refuse_labels()
        traffic = view.traffic
        before = [at for at in traffic.addresses if at[1] == view.client and at[0] < view.round]
        wanted = len(before) if self.rounds is None else self.rounds - 1
        views = [view, *[traffic.open(*at) for at in list(reversed(before))[:wanted]]]
        tasks = [super(Joint, self).task(v, device) for v in views]
        rows, classes = share_images([task.labels[0].tolist() for task in tasks])
        labels = torch.tensor(classes, device=device).expand(self.seeds, -1)
        problem = replace(tasks[0].problem, count=len(classes), labels=labels[0])
        problem.notes.append(
            f"{len(views)} updates of client {view.client}, {len(classes)} images behind them by "
            f"their labels"
        )
        matcher = JointMatcher([task.matcher for task in tasks], rows)
        fingerprints = " ".join(task.fingerprint for task in tasks)
        return Task(problem, matcher, labels, f"{rows} {fingerprints}", wanted=len(rows[0]))


def share_images(labels: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Which images each update saw, in the order of its labels, and the class of every image.

    A class is assumed to have as many images as the update that shows most of it.
    """
    slots: dict[int, list[int]] = {}
    classes: list[int] = []
    rows: list[list[int]] = []
    for batch in labels:
        used: Counter[int] = Counter()
        indices = []
        for label in batch:
            of_class = slots.setdefault(label, [])
            if used[label] == len(of_class):
                of_class.append(len(classes))
                classes.append(label)
            indices.append(of_class[used[label]])
            used[label] += 1
        rows.append(indices)
    return rows, classes


class JointMatcher:
    """Several matchers over one set of images; ``rows`` says which of them each one sees."""

    def __init__(self, matchers: Sequence[Matching], rows: Sequence[Sequence[int]]):
        self.matchers, self.rows = list(matchers), [list(r) for r in rows]
        self.notes = list(dict.fromkeys(note for m in matchers for note in m.notes))

    def __call__(self, images: Tensor, labels: Tensor) -> Match:
        value = images.new_zeros(len(images))
        derivative = torch.zeros_like(images)
        for matcher, rows in zip(self.matchers, self.rows, strict=True):
            match = matcher(images[:, rows], labels[:, rows])
            value = value + match.value
            derivative[:, rows] += match.images
        return Match(value / len(self.rows), derivative / len(self.rows), None)

    def value(self, images: Tensor, labels: Tensor) -> Tensor:
        return self(images, labels).value

    def state(self) -> dict[str, float]:
        states = [matcher.state() for matcher in self.matchers]
        return {f"{i}.{key}": value for i, s in enumerate(states) for key, value in s.items()}

    def restore(self, state: Mapping[str, float]) -> None:
        for index, matcher in enumerate(self.matchers):
            prefix = f"{index}."
            part = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            matcher.restore(part)
