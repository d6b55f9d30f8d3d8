"""Fishing for one picture of a batch (after Wen et al. 2022): only the head's weights change.

Class fishing: all rows of the head are zero but the target's, whose bias is so far below those of
the others that it is never predicted. Then W^T (p - y) is exactly zero for pictures of other
classes, and minus the row for those of the target: one such picture sends all that reaches the
backbone. The row is random, because a constant one dies behind LayerNorm. It is large: over several
local steps the other rows grow by lr (y - p) f and let other pictures through, the less the smaller
they are beside it; and it lifts what arrives above the rounding of weights and of fixed-point sums.

Feature fishing, for batches of one class, puts a gate before them; see `gates`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.attacks.manoeuvres.counting import (
    ONE,
    count_class,
    count_gate,
    gate_of,
    passed_through,
    row_of,
)
from fedsim.attacks.manoeuvres.gates import (
    Gate,
    Interval,
    Passed,
    features_of,
    first_interval,
    first_theta,
    made_up_pictures,
    narrowed,
)
from fedsim.attacks.manoeuvres.reading import (
    clients_behind,
    count_others,
    group_of,
    is_silent,
    labels_behind,
    only_sums,
    pictures_expected,
    read_head,
    scaled,
    with_lone_head,
    without_head,
)
from fedsim.attacks.pulls import momentum_pull
from fedsim.core.anatomy import batchnorm_names, head_names
from fedsim.core.errors import AttackError, ModelError, SpecError
from fedsim.core.learning import digest
from fedsim.core.manoeuvre import Brief, Isolated, Manoeuvre, Memory, Sighting, Tampered
from fedsim.core.observation import Public
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Spec, Upload

_GAP = 9e5  # a client's loss is at most about the gap, and above 1e6 it is not admitted
_ROW, _ROW_OF_STEPS = 1000.0, 5000.0
_MISSES = 3  # from so many on a client is believed not to keep its batch
_FAINT = 0.1  # of a picture: what all others may send beside the one that is fished
_TAKEN, _TRIED = 0.01, 8  # how surely others may be taken for it, of so many made-up pictures
_SURROGATES = 96  # pictures that are looked at


@dataclass(frozen=True)
class Fishing(Manoeuvre):
    """``kind`` auto: class, and feature where a client's labels are known and all the same.

    ``target``: the class to fish for; None takes one that occurs once among the labels last read
    from that client, and before any were read every class in turn. ``threshold``: where a gate is
    placed at first: by pictures of the server's own (``surrogate``), by pictures that it makes up
    (``blind``), and then closer to the least picture with each round (``bisect``), for as long as a
    client keeps its batch; ``auto`` is bisect from the best start there is. ``strength`` below 1:
    the head is blended with the honest one, and row and gap are smaller. ``row`` None: as large as
    the client's steps bear.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"surrogate"})

    kind: Literal["auto", "class", "feature"] = "auto"
    target: Annotated[int, Field(ge=0)] | None = None
    threshold: Literal["auto", "surrogate", "bisect", "blind"] = "auto"
    strength: Annotated[float, Field(gt=0, le=1)] = 1.0
    row: Annotated[float, Field(gt=0)] | None = None
    gap: Annotated[float, Field(gt=0, le=9e5)] = _GAP

    # -- what is sent ---------------------------------------------------------------------------

    def check_model(self, model: nn.Module, public: Public) -> None:
        classes = public.num_classes
        try:
            names = head_names(model)
        except ModelError as error:
            raise SpecError(f"fishing needs a linear head: {error}") from error
        if len(names) < 2:
            raise SpecError("fishing needs a head with a bias, and this model's has none.")
        if model.get_parameter(names[1]).shape != (classes,):
            raise SpecError("fishing needs a linear head with one row per class.")
        if getattr(model, "head_dist", None) is not None:
            raise SpecError("fishing needs one head, and this model averages two.")
        if not any(p.requires_grad for n, p in model.named_parameters() if n not in names):
            raise SpecError(
                "fishing leaves one picture in the gradient of what is before the head, and nobody "
                "trains anything there (train.trainable)."
            )
        if classes < 2:
            raise SpecError("fishing needs two classes or more: with one there is no gradient.")
        if self.target is not None and self.target >= classes:
            raise SpecError(
                f"fishing: target is {self.target}, and the classes are 0 to {classes - 1}."
            )

    def check_spec(self, spec: Spec) -> None:
        if self.threshold == "surrogate" and spec.threat.surrogate is None:
            raise SpecError(
                "fishing: threshold surrogate needs pictures of the server's own (threat G, "
                "threat.surrogate); auto and blind do without."
            )

    def tamper(self, brief: Brief) -> Tampered:
        group = group_of(brief.client, brief.public)
        known: dict[str, Any] = dict(brief.memory.get(group, {}))
        labels = Counter(known.get("labels", []))
        kind = self.kind
        if kind == "auto":
            kind = "feature" if len(labels) == 1 and labels.total() > 1 else "class"
        target = self._target(brief, kind, labels)
        if kind == "class":
            about = {"row": self._row(brief.public), "seed": _seed(brief, f"row {brief.round}")}
            head = self._class_head(brief, target, row_of(about, _width(brief)))
            return self._cast(brief, target, head, about, "class fishing")
        gate = self._gate(brief, known, labels[target])
        head = gate.head(brief.public.num_classes, _width(brief), target)
        return self._cast(brief, target, head, {"gate": gate.plain()}, "feature fishing")

    def _target(self, brief: Brief, kind: str, labels: Counter[int]) -> int:
        if self.target is not None:
            return self.target
        if labels and kind == "feature":
            return labels.most_common(1)[0][0]
        if labels:
            once = sorted(label for label, times in labels.items() if times == 1)
            rarest = once or [min(labels, key=lambda label: (labels[label], label))]
            return rarest[brief.round % len(rarest)]
        shift = 0 if only_sums(brief.public) else brief.client  # a cohort's sum is one batch
        return (brief.round - 1 + shift) % brief.public.num_classes

    def _class_head(self, brief: Brief, target: int, row: Tensor) -> tuple[Tensor, Tensor]:
        classes = brief.public.num_classes
        weight, bias = torch.zeros(classes, len(row)), torch.zeros(classes)
        weight[target] = row
        bias[target] = -(self.gap**self.strength)  # not the others' above: zero is exact
        return weight, bias

    def _row(self, public: Public) -> float:
        """Learning from the target lifts its logit by about lr row^2 / B a step, which must stay
        below the gap: beyond, the target is predicted for every picture, and all answer."""
        protocol, size = public.protocol, self.row or _ROW
        if self.row is None and protocol.upload is Upload.DELTA and protocol.optimizer == "sgd":
            moved = protocol.lr * momentum_pull(protocol, public.local_steps or 1)
            size = min(_ROW_OF_STEPS, math.sqrt(self.gap * public.batch_size / (4 * moved)))
        return float(size**self.strength)

    def _gate(self, brief: Brief, known: dict[str, Any], expected: int) -> Gate:
        steep = brief.public.protocol.upload is not Upload.GRADIENT or only_sums(brief.public)
        bisects = self.threshold == "bisect" or (
            self.threshold == "auto" and known.get("misses", 0) < _MISSES
        )
        if bisects and "interval" in known:
            return Gate.within(known["seed"], Interval(*known["interval"]), steep=steep)
        seed = _seed(brief, f"direction {brief.round}")
        features = self._features(brief)
        projections = features @ Gate(seed, 0, 1, 0, 0).direction(features.shape[1])
        batch = expected if expected > 1 else pictures_expected(brief)
        interval = first_interval(projections, batch)
        at = first_theta(projections, batch) if steep else None
        return Gate.within(seed, interval, steep=steep, at=at)

    def _features(self, brief: Brief) -> Tensor:
        blind = self.threshold == "blind" or brief.surrogate is None
        if brief.surrogate is None and self.threshold == "surrogate":
            raise AttackError(
                "fishing: threshold surrogate needs the server's own pictures (threat G); "
                "auto and blind do without."
            )
        images = made_up_pictures(brief.public.image_size)
        if not blind and brief.surrogate is not None:
            images = brief.surrogate[:_SURROGATES]
        about = digest({**brief.weights, "pictures": images})
        if about not in _LAST:
            features = features_of(brief.loaded(), images, brief.public.protocol)
            _LAST.clear()
            _LAST[about] = features
        return _LAST[about]

    def _cast(
        self,
        brief: Brief,
        target: int,
        head: tuple[Tensor, Tensor],
        about: dict[str, Any],
        words: str,
    ) -> Tampered:
        names, share = _head(brief), self.strength
        changed = {
            name: torch.lerp(brief.weights[name].float().cpu(), chosen, share)
            for name, chosen in zip(names, head, strict=True)
        }
        about = {"target": target, "cohort": len(brief.cohort), **about}
        return Tampered(changed, about, f"{words} for class {target}")

    # -- what came back -------------------------------------------------------------------------

    def learn(self, seen: Sighting, memory: Memory) -> None:
        """Remember the labels, and where the least projection lies. A cohort's mean arrives once
        for each of its clients, and is learned from once."""
        group = group_of(seen.client, seen.public)
        known = dict(memory.get(group, {}))
        if group == "cohort" and known.get("round") == seen.round:
            return
        known["round"] = seen.round
        model, target = seen.loaded(), int(seen.about.get("target", -1))  # -1: an honest round
        head, gate = read_head(seen, model), gate_of(seen)
        labels = labels_behind(seen, model, None if gate is None else target)
        if labels is not None:
            known["labels"] = labels
        if (
            gate is not None
            and head is not None
            and head.known
            and not count_others(seen, head, target)
        ):
            silent = is_silent(without_head(seen.update, model).tensors)
            passed = Passed(0.0, None, 0.0) if silent else passed_through(seen, gate, head)
            self._learn_gate(known, gate, passed)
        memory[group] = known

    def _learn_gate(self, known: dict[str, Any], gate: Gate, passed: Passed) -> None:
        placed = known.pop("interval", None)
        if passed.count is not None and 0 < passed.count <= ONE:
            known.pop("misses", None)
            return  # one is isolated: another direction next time, for another picture
        interval, agrees = narrowed(gate, passed)
        if not interval.is_spent:
            known["interval"], known["seed"] = list(interval), gate.seed
        if placed is not None and not agrees:
            known["misses"] = known.get("misses", 0) + 1  # the client may take other pictures

    def isolate(self, seen: Sighting) -> Isolated:
        model, target = seen.loaded(), int(seen.about["target"])
        update = without_head(seen.update, model)
        notes = self._notes(seen, model)
        if is_silent(update.tensors):
            return Isolated(update, 0, None, 0.0, "no picture answered: nothing reached the model")
        gate, head = gate_of(seen), read_head(seen, model)
        if gate is None and (gentle := self._too_gentle(seen, model, target)):
            return Isolated(seen.update, seen.pictures, None, None, gentle)
        if gate is None:
            count, words = count_class(seen, model, head, target)
        else:
            count, words = count_gate(seen, gate, head)
        if count is None:
            remain, words = 1, f"{words}; taken as one"
        else:  # what passes a gate is a fraction of one picture, or more than one
            remain = round(count) if gate is None else max(1, math.ceil(count - (ONE - 1)))
            remain = min(max(0, remain), seen.pictures)
        if remain == 0 and head is not None and not head.known:
            remain, words = (
                1,
                "how many answered is not known: the update's size is not; taken as one",
            )
        if remain == 0 and self.strength < 1:  # what arrived is of others, as they came
            words = f"no picture of class {target} answered; read as it came"
            return Isolated(seen.update, seen.pictures, None, None, words)
        if remain == 0:
            words = f"no picture of class {target} answered"
            return Isolated(update, 0, None, count, "; ".join([words, *notes]))
        left = scaled(update, seen.pictures / remain, remain)
        if remain == 1 and head is not None:
            left = with_lone_head(left, seen, model, head, target)
        return Isolated(
            left,
            remain,
            torch.full((remain,), target),
            count,
            "; ".join([words, *notes]),
        )

    def _too_gentle(self, seen: Sighting, model: nn.Module, target: int) -> str | None:
        """Why a blended head isolates nobody; None where it does.

        Others must never be taken for the target, or they answer as well and counts are wrong; and
        what they send back by their own rows must be faint beside the target's.
        """
        if self.strength == 1:
            return None
        names = head_names(model)
        weight = seen.weights[names[0]].detach().double().cpu()
        others = torch.arange(len(weight)) != target
        beside = float(weight[others].norm(dim=1).max() / weight[target].norm().clamp(min=1e-30))
        if (beside := beside * (seen.pictures - 1)) > _FAINT and seen.pictures > 1:
            return f"too gentle to isolate: others send up to {beside:.2g} of what a picture does"
        images = made_up_pictures(seen.public.image_size)[:_TRIED]
        features = features_of(model.eval(), images, seen.public.protocol).double().cpu()
        logits = features @ weight.T + seen.weights[names[1]].detach().double().cpu()
        taken = float(logits.softmax(1)[:, target].max())
        if taken > _TAKEN:
            return f"too gentle to isolate: others are taken for class {target} ({taken:.2g})"
        return None

    def _notes(self, seen: Sighting, model: nn.Module) -> list[str]:
        notes = []
        if self.strength < 1:
            notes.append("the head is blended with the honest one: other pictures are faint beside")
        if seen.public.protocol.mode == "train" and batchnorm_names(model):
            notes.append("BatchNorm in train mode mixes the batch: the isolation is approximate")
        if seen.update.kind is Upload.DELTA and (seen.public.local_steps or 2) > 1:
            notes.append("over several local steps other pictures are faint beside it")
        if clients_behind(seen) > 1:
            notes.append(f"one of the {clients_behind(seen)} clients behind the sum")
        return notes


_LAST: dict[str, Tensor] = {}  # the features of one round's model, which all its clients share


def _head(brief: Brief) -> list[str]:
    return head_names(brief.model())


def _seed(brief: Brief, purpose: str) -> int:
    """Of a choice that all clients share where only their sum arrives."""
    return seed_from(f"fishing {brief.seed} {group_of(brief.client, brief.public)} {purpose}")


def _width(brief: Brief) -> int:
    return int(brief.weights[_head(brief)[0]].shape[1])
