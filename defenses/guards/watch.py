"""Watch: all guards of a client at work in one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.core.guard import Finding, Guard, Scene

_PREFIX = "guard/"  # of what guards keep, beside what defenses keep back


@dataclass(frozen=True)
class Watch:
    """What the guards of a client found in a round, and what they keep of it."""

    findings: list[Finding] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """Why the client does not upload; None where it does."""
        return next((f"{f.guard}: {f.words}" for f in self.findings if f.refused), None)

    def plain(self) -> list[dict[str, Any]]:
        """For a file."""
        return [finding.plain() for finding in self.findings]


def inspected(guards: Sequence[Guard], scene: Scene | None) -> Watch:
    """Have every guard look, also where one of them refuses: a record tells what each found.

    Training goes on as if nobody had looked: the model is what it was, and so is torch's coin.
    """
    if not guards or scene is None:
        return Watch()
    findings, kept = [], dict[str, Tensor]()
    for guard in guards:
        mode, state = scene.model.training, _copied(scene)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            remembered = {name: t.detach().cpu().clone() for name, t in guard.keep(scene).items()}
            finding = guard.inspect(scene)
        kept |= {f"{_PREFIX}{name}": tensor for name, tensor in remembered.items()}
        scene.model.load_state_dict(state)
        scene.model.train(mode)
        scene.model.zero_grad(set_to_none=True)
        findings.append(replace(finding, refused=finding.fired and guard.refuse))
    if any(finding.fired for finding in findings):  # suspicious weights are nobody's yardstick
        kept = {f"{_PREFIX}{name}": tensor for name, tensor in scene.kept.items()}
    return Watch(findings, kept)


def guarded_before(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the guards of a client kept in the last round it took part in, of all its state."""
    return {n.removeprefix(_PREFIX): t for n, t in stored.items() if n.startswith(_PREFIX)}


def _copied(scene: Scene) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in scene.model.state_dict().items()}
