"""Inconsistent weights (after Pasquini et al. 2022): one client of a cohort is made to stand alone.

All clients but the victim get a head of zeros. What a head sends back is W^T (p - y), so their
gradient is exactly zero in all that stands before it, and the sum that secure aggregation reveals
is there the victim's own. The head's part is still everybody's, and is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.attacks.manoeuvres.gates import made_up_pictures
from fedsim.attacks.manoeuvres.reading import clients_behind, is_silent, scaled, without_head
from fedsim.core.anatomy import head_names
from fedsim.core.errors import ModelError, SpecError
from fedsim.core.manoeuvre import Brief, Isolated, Manoeuvre, Memory, Sighting, Tampered
from fedsim.core.observation import Public
from fedsim.core.spec import Spec, Upload


@dataclass(frozen=True)
class Inconsistent(Manoeuvre):
    """``victim``: the client to single out; None takes those of the cohort in turn, by round.
    ``lure``: a manoeuvre that chooses the victim's weights, as ``{name: fishing, target: 3}``;
    None: the victim gets the honest ones."""

    victim: Annotated[int, Field(ge=0)] | None = None
    lure: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._lure()  # a wrong one is refused when the spec is read

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        lure = self._lure()
        return Manoeuvre.needs | (lure.needs if lure else frozenset())

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]
        lure = self._lure()
        return lure.uses if lure else frozenset()

    def _lure(self) -> Manoeuvre | None:
        if self.lure is None:
            return None
        params = dict(self.lure)
        name = params.pop("name", None)
        if not isinstance(name, str):
            raise SpecError("inconsistent: its lure needs a name, as {name: fishing}.")
        if name == "inconsistent":
            raise SpecError("inconsistent: its lure must be another manoeuvre.")
        return create_manoeuvre(name, **params)

    def check_model(self, model: nn.Module, public: Public) -> None:
        try:
            head = head_names(model)
        except ModelError as error:
            raise SpecError(f"inconsistent needs a linear head: {error}") from error
        if not _is_silenced(model, head, public):
            raise SpecError(
                "inconsistent silences clients by a head of zeros, and this model learns past it "
                "(it has a second head, or an auxiliary loss)."
            )
        if lure := self._lure():
            lure.check_model(model, public)

    def check_spec(self, spec: Spec) -> None:
        if lure := self._lure():
            lure.check_spec(spec)
        if self.victim is None:
            return
        met = [r for r in spec.tampered_rounds if self.victim in spec.cohort(r)]
        if not set(met) & set(spec.audited_rounds):
            raise SpecError(
                f"inconsistent: client {self.victim} is asked in no round that is tampered with "
                f"and audited; threat H with server.clients=[{self.victim}] asks it in all of them."
            )

    def aimed_at(self, round_: int, cohort: Sequence[int]) -> int | None:
        victim = self._victim(round_, cohort)
        return victim if victim in cohort else None

    # -- what is sent ---------------------------------------------------------------------------

    def tamper(self, brief: Brief) -> Tampered:
        victim = self._victim(brief.round, brief.cohort)
        if victim not in brief.cohort:
            return Tampered({}, {}, f"honest weights: client {victim} is not asked in this round")
        lured = self._lured(brief, victim)
        about = {"victim": victim, "lure": lured.about, "cohort": len(brief.cohort)}
        if brief.client == victim:  # what the lure's own attack looks for stands in its place
            words = f"the victim; {lured.words or 'honest weights'}"
            return Tampered(lured.changed, {**lured.about, **about}, words)
        head = head_names(brief.model())[0]
        silent = {head: torch.zeros_like(brief.weights[head])}
        return Tampered(silent, about, f"a head of zeros, for client {victim} to stand alone")

    def _victim(self, round_: int, cohort: Sequence[int]) -> int:
        if self.victim is not None:
            return self.victim
        return cohort[(round_ - 1) % len(cohort)]

    def _lured(self, brief: Brief, victim: int) -> Tampered:
        """What the victim is sent: every client's record tells how the sum is to be read."""
        lure = self._lure()
        if lure is None:
            return Tampered()
        memory = brief.memory.get("lure", {}).get("own", {})
        return lure.tamper(replace(brief, client=victim, memory=memory))

    # -- what came back -------------------------------------------------------------------------

    def learn(self, seen: Sighting, memory: Memory) -> None:
        lure, victim = self._lure(), seen.about.get("victim")
        if lure is None or victim is None or (seen.client != victim and clients_behind(seen) == 1):
            return
        within = dict(memory.get("lure", {}))
        if within.get("learned") == seen.round:  # a cohort's mean arrives once for each client
            return
        own = dict(within.get("own", {}))
        lure.learn(self._victims(seen), own)
        memory["lure"] = {"learned": seen.round, "own": own}

    def isolate(self, seen: Sighting) -> Isolated | None:
        if "victim" not in seen.about:
            return None
        lure, victim, behind = self._lure(), int(seen.about["victim"]), clients_behind(seen)
        model = seen.loaded()
        if behind == 1 and seen.client != victim:
            words = f"silenced: its head was zero, for client {victim} to stand alone"
            return Isolated(without_head(seen.update, model), 0, None, 0.0, words)
        if behind == 1:
            return lure.isolate(seen) if lure else None
        own = self._victims(seen)
        away = bool(seen.stayed) and victim not in seen.stayed
        if away or is_silent(own.update.tensors):
            return Isolated(
                own.update, 0, None, 0.0, f"client {victim} sent nothing, or stayed away"
            )
        words = f"of client {victim} alone, of the {behind} behind the sum"
        if own.update.kind is Upload.DELTA and (seen.public.local_steps or 2) > 1:
            words += "; over several local steps the others' heads leave zero, and are faint beside"
        if lure is None:
            return Isolated(own.update, own.pictures, None, None, words)
        isolated = lure.isolate(own)
        if isolated is None:
            return Isolated(own.update, own.pictures, None, None, words)
        return replace(isolated, words=f"{words}; {isolated.words}")

    def _victims(self, seen: Sighting) -> Sighting:
        """What the victim alone uploaded, as far as a cohort's mean holds it: all but the head."""
        behind, about = clients_behind(seen), dict(seen.about.get("lure", {}))
        if behind == 1 or not seen.about:
            return replace(seen, about=about)
        pictures = seen.pictures // behind
        update = scaled(without_head(seen.update, seen.loaded()), behind, pictures)
        victim = int(seen.about["victim"])
        return replace(
            seen,
            client=victim,
            update=update,
            about=about,
            pictures=pictures,
            stayed=(victim,),
            # a delta is not scaled, since all of a cohort decayed its weights alike
            diluted=behind if update.kind is Upload.DELTA else 1,
        )


def _is_silenced(model: nn.Module, head: list[str], public: Public) -> bool:
    """Whether a head of zeros keeps every gradient from all that stands before it: tried on two
    made-up pictures."""
    silent = copy.deepcopy(model).eval()
    with torch.no_grad():
        silent.get_parameter(head[0]).zero_()
    trained = {n: p for n, p in silent.named_parameters() if p.requires_grad and n not in head}
    if not trained:
        return True
    images = public.protocol.normalise(made_up_pictures(public.image_size)[:2])
    images = images.to(next(iter(trained.values())).device)
    with torch.enable_grad():
        logits = silent(images)
        loss = F.cross_entropy(logits, torch.zeros(2, dtype=torch.long, device=images.device))
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return not any(gradient is not None and bool(gradient.any()) for gradient in gradients)
