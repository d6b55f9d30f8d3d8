"""The rule for active servers: what one picture alone gives away, a server that chooses the weights
takes out of any batch and any sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedsim.core.knowledge import THREATS
from fedsim.core.spec import Spec, Upload
from fedsim.lint.facts import Facts, gather
from fedsim.lint.findings import Finding
from fedsim.lint.remedies import guarded, guards_that_refuse, trusted_guards

NAMES = {
    "active-server": "one picture of any batch, for a server that chooses the weights",
    "guards-only-warn": "guards that notice and let the upload go",
}


def active_server(
    facts: Facts, alone_rules: tuple[Callable[[Facts], Iterator[Finding]], ...]
) -> Iterator[Finding]:
    """Fishing leaves one picture of a batch in the update; the rules for one picture then apply."""
    if not THREATS[facts.spec.threat.model].deeds or not facts.biased:
        return
    found = [finding for rule in alone_rules for finding in rule(gather(_alone(facts.spec)))]
    pictures = [finding for finding in found if finding.severity != "note"]
    if not pictures:
        return
    refusing, trusted = guards_that_refuse(facts), trusted_guards(facts)
    batch = f"batches of {facts.spec.train.step_size}"
    hidden = " and through secure aggregation" if facts.named("secure_aggregation") else ""
    reason = (
        f"The server chooses the weights (threat {facts.spec.threat.model}): with a head that "
        f"answers to one class or one feature, a single picture is left in the update of {batch}"
        f"{hidden}, and that one comes back as a picture alone would ({pictures[0].rule})."
    )
    if trusted:
        yield Finding(
            "active-server",
            "note",
            f"{reason} {', '.join(trusted)} would refuse to upload what looks like it; how gentle "
            f"a server can be, an audit shows.",
            threat="F",
        )
        return
    # A penalty on what is drawn inside the network lets the other pictures through (PRECODE).
    blurred = any(
        named.defense.spares or (named.acts_on("toss") and named.acts_on("penalty"))
        for named in facts.defenses
    )
    certain = all(finding.severity == "certain" for finding in pictures)
    exact = facts.steps == 1 and certain and not blurred
    more = "" if exact else " Several local steps and defenses blur it."
    if refusing:
        exact = False
        more += f" {', '.join(refusing)} would refuse some manoeuvres and let others through."
    yield Finding(
        "active-server", "certain" if exact else "likely", reason + more, guarded(facts), "F"
    )


def guards_only_warn(facts: Facts) -> Iterator[Finding]:
    """A guard that lets the upload go protects nobody."""
    warning = [c.name for c in facts.spec.guards if not c.params.get("refuse")]
    if warning and not guards_that_refuse(facts):
        reason = (
            f"{', '.join(warning)} only warns: what it notices is uploaded all the same. A guard "
            f"protects where it refuses."
        )
        yield Finding("guards-only-warn", "note", reason, guarded(facts))


def _alone(spec: Spec) -> Spec:
    """The same federation with one picture in each update, and a server that changes nothing."""
    steps = {"batch_size": 1, "local_steps": None, "local_epochs": None}
    plain = {"optimizer": "sgd", "momentum": 0.0, "upload": Upload.GRADIENT}
    train = spec.train.model_copy(update={**steps, **plain})
    threat = spec.threat.model_copy(update={"model": "C", "surrogate": None})
    defenses = [c for c in spec.defenses if c.name != "secure_aggregation"]
    server = type(spec.server)()
    changes = {"train": train, "threat": threat, "defenses": defenses, "server": server}
    return spec.model_copy(update=changes)
