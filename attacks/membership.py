"""Membership: of every candidate, how likely it is that its picture is behind the update.

A picture that was in the batch has left its own gradient in the update, among those of the others.
Most of a gradient is not its own: it is what pictures of its label, or any pictures, have in
common. That is learned from references (`references`), among them some that are given the
candidate's label, and left out (`evidence`); so that a label which is in the batch is no sign that
the candidate is. What is left is weighed as a likelihood ratio. Where other clients' updates were
seen, in which the candidate was not, it is weighed against what those say of it.

Every candidate is judged for itself: what else is on the list plays no part. Beside the score goes
what the candidate's label alone would say: how often it was read from the update. A weight delta is
read as the direction that the local steps went. Derived here; kin to the gradient-based attack of
Nasr et al. (2019), the scores of Carlini et al. (2022), and the difference of cosines of Li et al.
(2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsim.attacks.evidence import Evidence, Explained, likelihood
from fedsim.attacks.gradients import Gradients
from fedsim.attacks.labels import behind, recover_labels
from fedsim.attacks.references import reference_pictures
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.defense import Informed
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Update
from fedsim.core.spec import Spec

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Membership(Attack):
    """``references``: pictures with labels as in the batch; ``own``: that many of them once more,
    with the candidate's label; ``others``: updates of other clients and rounds that it is weighed
    against; ``numbers``: of a gradient that are looked at, drawn at random where there are more;
    ``adaptive``: use what is known of the client's defenses."""

    needs: ClassVar[frozenset[str]] = frozenset(
        {
            "update",
            "weights",
            "architecture",
            "image_size",
            "normalisation",
            "batch_size",
            "candidates",
        }
    )

    references: Annotated[int, Field(ge=2)] = 448
    own: Count = 16
    others: Count = 0
    numbers: Annotated[int, Field(ge=1)] = 2**19
    adaptive: bool = True

    @property
    def uses(self) -> frozenset[str]:
        """The traffic only where there is a use for it: it has every round kept."""
        known = {"optimizer", "learning_rate", "local_steps", "defenses", "surrogate"}
        return frozenset(known | ({"traffic"} if self.others else set()))

    def check_spec(self, spec: Spec) -> None:
        if spec.captured is not None:
            raise AttackError("candidates come from the clients' data set, and it is not known.")

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        candidates, notes = view.candidates, ["no picture is claimed: who was in the batch alone"]
        pictures, words = reference_pictures(view, self.references)
        notes.append(f"what pictures have in common is learned from {words}")
        rounds = list(self._rounds(view))
        found: list[dict[int, Evidence]] = []
        for at, views in enumerate(rounds):
            sight = _Sight.of(self, views, pictures, device)
            found.append({})
            for row, evidence in sight.look(candidates.images, candidates.labels, self.own):
                found[at][row] = evidence
                done = at * len(candidates) + len(found[at])
                progress(done, len(rounds) * len(candidates))
            if at == 0:
                share, counts = sight.share, sight.counts
                notes += sight.notes
        scores = []
        for row in range(len(candidates)):
            first, *rest = [by_row[row] for by_row in found]
            others = torch.cat([first.told[1:], *[evidence.told for evidence in rest]])
            scores.append(likelihood(first, share, others))
        columns = [torch.tensor(scores, dtype=torch.float64)]
        columns += [] if counts is None else [counts[candidates.labels].double()]
        if (seen := sum(map(len, rounds)) - 1) > 0:
            notes.append(f"weighed against {seen} other updates")
        side = view.image_size
        return Reconstruction(
            images=torch.zeros(0, 3, side, side), membership=torch.stack(columns, 1), notes=notes
        )

    def _rounds(self, view: View) -> Iterator[list[View]]:
        """This view with others of the same weights; then those of other rounds, the latest
        first, until there are enough. The client's own other updates may be of the same pictures,
        and so is the sum of a cohort, which is all that is seen of any of its members."""
        left = self.others if view.grants("traffic") else 0
        addresses = view.traffic.addresses if left else ()
        rounds = sorted({round_ for round_, _ in addresses} | {view.round}, reverse=True)
        for round_ in sorted(rounds, key=lambda number: number != view.round):
            there = [view] if round_ == view.round else []
            for address in addresses:
                if left and address[0] == round_ and address[1] != view.client:
                    other = view.traffic.open(*address)
                    if (not there or _same(other.weights, there[0].weights)) and not _same(
                        other.update.tensors, view.update.tensors
                    ):
                        there.append(other)
                        left -= 1
            if there:
                yield there


@dataclass(frozen=True)
class _Sight:
    """Updates of clients that were sent the same weights, and what references explain of them."""

    gradients: Gradients
    pictures: Tensor
    explained: Explained  # by references with labels as in the first of the updates
    counts: Tensor | None  # (C,): how often each label was read there; None where none could be
    share: float  # that one of its pictures has in it
    notes: list[str]

    @classmethod
    def of(
        cls, attack: Membership, views: list[View], pictures: Tensor, device: torch.device
    ) -> _Sight:
        view = views[0]
        model = view.model().to(device)
        informed = [v.informed(model) if attack.adaptive else Informed(v.update) for v in views]
        first, notes = informed[0], list(informed[0].notes)
        gradients = Gradients.of(
            view, model, first.update.tensors, pictures,
            numbers=attack.numbers, masked=first.masked,
        )  # fmt: skip
        updates = [u.update for u in informed if gradients.kept.keys() <= u.update.tensors.keys()]
        directions = [u.kind.sign * gradients.flat(u.tensors).to(device) for u in updates]
        labels, counts = _labels(view, first.update, gradients.classes, notes)
        # In turn, so that as many of them as there are pictures have the labels of a whole batch.
        given = labels[torch.arange(len(pictures)) % len(labels)]
        explained = Explained(torch.stack(directions), [gradients.of_all(pictures, given)])
        count = behind(view)[0]
        share = explained.scale(count) / count
        return cls(gradients, pictures, explained, counts, share, notes)

    def look(self, pictures: Tensor, labels: Tensor, own: int) -> Iterator[tuple[int, Evidence]]:
        """What the updates say of each picture with its label; label by label, because the
        references that get a label take room."""
        for label in labels.unique().tolist():
            some = self.pictures[:own]
            given = torch.full((len(some),), label)
            explained = self.explained
            if own:
                explained = explained.with_more(self.gradients.of_all(some, given))
            for row in (labels == label).nonzero()[:, 0].tolist():
                yield row, explained.beside(self.gradients.of_one(pictures[row], label))


def _labels(
    view: View, update: Update, classes: int, notes: list[str]
) -> tuple[Tensor, Tensor | None]:
    """The labels that references are given, and how often each was read from the update."""
    count, steps, epochs = behind(view)
    try:
        labels = recover_labels(
            update, view.model(), count, protocol=view.known_protocol(), steps=steps, epochs=epochs
        )
    except AttackError as error:
        notes.append(f"references get all labels in turn: {error}")
        return torch.arange(classes), None
    return labels, torch.bincount(labels, minlength=classes)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())
