"""Servers and guards made to order, for tests of what the testbed does with them; named in specs by
their import path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.core.guard import Finding, Guard, Scene
from fedsim.core.manoeuvre import Brief, Isolated, Manoeuvre, Memory, Sighting, Tampered


@dataclass(frozen=True)
class OwnHead(Manoeuvre):
    """A random head for each client; remembers whom it has seen, and says that one picture is left
    to every client but those in ``empty``."""

    scale: float = 1.0
    empty: tuple[int, ...] = ()

    def tamper(self, brief: Brief) -> Tampered:
        shape = brief.weights["head.weight"].shape
        head = self.scale * torch.randn(shape, generator=brief.coin())
        met = len(brief.memory.get("seen", []))
        return Tampered({"head.weight": head}, {"client": brief.client, "met": met}, "a head")

    def learn(self, seen: Sighting, memory: Memory) -> None:
        memory.setdefault("seen", []).append([seen.round, seen.client, seen.pictures])

    def isolate(self, seen: Sighting) -> Isolated | None:
        left = 0 if seen.client in self.empty else 1
        return Isolated(seen.update, left, torch.zeros(left).long(), float(left), f"{left} left")


@dataclass(frozen=True)
class SameHead(OwnHead):
    """The same head for all, which leaves the batch whole."""

    alike: ClassVar[bool] = True

    def isolate(self, seen: Sighting) -> Isolated | None:
        return None


@dataclass(frozen=True)
class Misshapen(Manoeuvre):
    """Changes what no model has, or to what no model holds."""

    how: str = "name"

    def tamper(self, brief: Brief) -> Tampered:
        head = brief.weights["head.weight"]
        changed = {
            "name": {"nobody": head},
            "shape": {"head.weight": head[:1]},
            "numbers": {"head.weight": head * float("nan")},
            "memory": {},
        }[self.how]
        if self.how == "raises":
            raise KeyError("its own fault")
        about = {"what": object()} if self.how == "memory" else {}
        return Tampered(changed, about)


@dataclass(frozen=True, kw_only=True)
class Suspicious(Guard):
    """Says what it is told to, and keeps the head's norm; it leaves the model changed."""

    score: float = 1.0

    def inspect(self, scene: Scene) -> Finding:
        before = scene.kept.get("suspicious/norm")
        words = "never met" if before is None else f"was {float(before):.3f}"
        for parameter in scene.model.parameters():
            parameter.data.zero_()
        scene.model.train(not scene.model.training)
        torch.rand(3)
        return Finding("suspicious", self.score, 0.5, words)

    def keep(self, scene: Scene) -> dict[str, Tensor]:
        return {"suspicious/norm": scene.received["head.weight"].norm()}


@dataclass(frozen=True, kw_only=True)
class OneRefuses(Guard):
    """Speaks up at one client alone."""

    client: int = 0

    def inspect(self, scene: Scene) -> Finding:
        return Finding("one_refuses", float(scene.client == self.client), 0.5, "by its number")
