"""Plan: what a spec asks for, checked before a round runs: attacks, victims, jobs, lessons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.attacks.generators import generator_metadata, load_generator, takes_labels
from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.campaign.jobs import Job, LessonJob
from fedsim.campaign.suites import Cast, Role, cast_of
from fedsim.campaign.surrogate import check_surrogate, find_surrogate, same_data
from fedsim.clients import check_shards, images_of
from fedsim.core.attack import BASELINE, lessons_needed, needs_of, reads_traffic, traits_of
from fedsim.core.augment import check_augmentation
from fedsim.core.candidates import CANDIDATES
from fedsim.core.device import resolve_device
from fedsim.core.errors import AttackError, ModelError, NotGranted, SpecError
from fedsim.core.knowledge import FIELDS, THREATS, granted_by, refuse_unplayed
from fedsim.core.losses import refuse_other_classes
from fedsim.core.manoeuvre import Manoeuvre
from fedsim.core.models import build_model
from fedsim.core.observation import Public
from fedsim.core.prior_networks import load_prior
from fedsim.core.run import Run, lesson_path
from fedsim.core.seal import sealed
from fedsim.core.spec import Component, Spec
from fedsim.defenses.applied import declared, prepared, refuse_other_training
from fedsim.defenses.guards import create_guards
from fedsim.federation.active import ActiveServer
from fedsim.federation.aggregation import create_strategy, masking


@dataclass(frozen=True)
class Plan:
    """A spec that was checked against everything it names, and the weights it starts from."""

    spec: Spec
    public: Public
    initial: dict[str, Tensor]

    def active(self, *, at_hand: bool = True) -> ActiveServer | None:
        """The server's side of its manoeuvre; None for an honest one."""
        manoeuvre = manoeuvre_of(self.spec)
        if manoeuvre is None:
            return None
        reads = "surrogate" in granted_by(self.spec.threat) & (manoeuvre.needs | manoeuvre.uses)
        surrogate = load_surrogate(self.spec, at_hand=at_hand) if reads else None
        return ActiveServer(manoeuvre, self.spec, self.public, surrogate)


def prepare(spec: Spec, classes: int | None = None, *, willing: bool = False) -> Plan:
    """Find every mistake that can be found before a round runs.

    Given the number of ``classes``, the data set is not opened: the clients have it, each a part.
    With ``willing``, attacks that cannot work on this model or with this training are let in, each
    to decline when it is asked: where several models share a table, or rounds that are done are
    looked at again.
    """
    refuse_unplayed(spec.threat, spec.server)
    _check_manoeuvre(spec)
    create_guards(spec.guards)
    for _, component in labelled_attacks(spec):
        check_needs(component, spec)
    defenses = declared(spec.defenses)
    refuse_other_training(spec.train, defenses)
    check_augmentation([one.model_dump() for one in spec.train.augment], spec.data.image_size)
    create_strategy(spec)
    resolve_device(spec.engine.device)
    at_hand = classes is None
    if classes is None:
        classes = len(images_of(spec.data, "train").classes)
        check_shards(spec)
    refuse_other_classes(spec.train.loss, classes)
    check_surrogate(spec, victims(spec), at_hand=at_hand)
    _check_prior(spec)
    played = roles(spec)  # a member that cannot work declines when it is asked
    for label, component in labelled_attacks(spec):
        _check_attack(component, spec, willing=willing or label in played)
    _check_generator(spec, classes)
    model = build_model(
        spec.model, image_size=spec.data.image_size, num_classes=classes, seed=spec.seed,
        prepare=partial(prepared, defenses=defenses, train=spec.train, seed=spec.seed),
    )  # fmt: skip
    public = Public.of(spec, classes)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if (manoeuvre := manoeuvre_of(spec)) is not None:
        with sealed():
            manoeuvre.check_model(model, public)
    if not willing:
        for label, component in labelled_attacks(spec):
            if label not in played:
                _check_model(component, model, public)
    return Plan(spec, public, initial)


def manoeuvre_of(spec: Spec) -> Manoeuvre | None:
    """What an active server does to the weights it sends; None for an honest one."""
    component = spec.server.manoeuvre
    return None if component is None else create_manoeuvre(component.name, **component.params)


def _check_manoeuvre(spec: Spec) -> None:
    """Refuse a manoeuvre that needs more than the threat model grants, or has nobody to act on."""
    manoeuvre = manoeuvre_of(spec)
    if manoeuvre is None:
        return
    assert spec.server.manoeuvre is not None
    lacking = sorted(manoeuvre.needs - granted_by(spec.threat))
    if lacking:
        letters = [t.letter for t in THREATS.values() if manoeuvre.needs <= t.grants]
        enough = [letter for letter in letters if letter != spec.threat.model]
        advice = f"; threat {enough[0]} does" if enough else ""
        advice = "" if spec.threat.withhold else advice
        raise NotGranted(
            f"the manoeuvre '{spec.server.manoeuvre.name}' needs {', '.join(lacking)} "
            f"({FIELDS[lacking[0]]}), which threat {spec.threat.model} does not grant{advice}."
        )
    with sealed():
        manoeuvre.check_spec(spec)
    _check_aim(manoeuvre, spec)
    if not set(spec.tampered_rounds) & set(spec.audited_rounds):
        raise SpecError(
            "no round that the server tampers with is audited: its manoeuvre has no victims; let "
            "server.rounds and audit.rounds meet."
        )


def _check_aim(manoeuvre: Manoeuvre, spec: Spec) -> None:
    """Refuse an audit that scores others than those whom the manoeuvre singles out: whoever is not
    scored cannot be found to leak."""
    chosen = set(victims(spec))
    met = set(spec.tampered_rounds) & set(spec.audited_rounds)
    for round_ in sorted(met):
        cohort = spec.cohort(round_)
        aim = manoeuvre.aimed_at(round_, cohort)
        aimed = list(cohort) if aim is None and masking(spec) is not None else [aim]
        missed = [
            client for client in aimed if client is not None and (round_, client) not in chosen
        ]
        if missed:
            raise SpecError(
                f"audit.victims leaves out client {missed[0]} in round {round_}, whose pictures "
                f"this server is after; leave audit.victims out, or audit fewer rounds."
            )


def check_needs(component: Component, spec: Spec) -> None:
    """Refuse an attack that needs what the threat model does not grant."""
    attack = create_attack(component.name, **component.params)
    granted, needs = granted_by(spec.threat), needs_of(attack)
    lacking = sorted(needs - granted)
    if lacking:
        enough = [t.letter for t in THREATS.values() if needs <= t.grants]
        advice = f"; threat {enough[0]} does" if enough else ""
        advice = "; threat.candidates=16 does" if lacking == [CANDIDATES] else advice
        raise NotGranted(
            f"the attack '{component.name}' needs {', '.join(lacking)} ({FIELDS[lacking[0]]}), "
            f"which threat {spec.threat.model} does not grant{advice}."
        )
    if CANDIDATES in needs and traits_of(attack).learner is not None:
        raise SpecError(
            f"the attack '{component.name}' is handed candidates and keeps a memory, which others "
            f"may read: of the two it can have one."
        )


def labelled_attacks(spec: Spec) -> list[tuple[str, Component]]:
    """The spec's attacks, those of its suite one by one, each with a name of its own, and the
    baseline once, where it is granted; its own name is given to no other."""
    return _labelled(spec, cast_of(spec))


def _labelled(spec: Spec, cast: Cast | None) -> list[tuple[str, Component]]:
    labelled: list[tuple[str, Component]] = []
    for given in spec.attacks:
        members = [member for member, _ in cast.parts] if cast and given.is_suite else [given]
        for component in members:
            if not (component.is_baseline and _baselines(labelled)):
                labelled.append((_label(component, [label for label, _ in labelled]), component))
    if not _baselines(labelled) and "image_size" in granted_by(spec.threat):
        labelled.append((BASELINE, Component(name=BASELINE)))
    return labelled


def roles(spec: Spec) -> dict[str, Role]:
    """What each attack of the spec's suite is in it, by the name it has in tables."""
    cast = cast_of(spec)
    if cast is None:
        return {}
    named = {id(component): label for label, component in _labelled(spec, cast)}
    return {named[id(component)]: role for component, role in cast.parts}


def _label(component: Component, taken: list[str]) -> str:
    """What an attack is called beside those that are named already: numbered until it is free."""
    short = component.short_name
    reserved = [] if component.is_baseline else [BASELINE]
    number = 1 + sum(1 for label in taken if label == short or label.startswith(f"{short}-"))
    label = f"{short}-{number}" if number > 1 else short
    while label in (*taken, *reserved):
        number += 1
        label = f"{short}-{number}"
    return label


def _baselines(labelled: Iterable[tuple[str, Component]]) -> list[str]:
    return [label for label, component in labelled if component.is_baseline]


def baseline_label(spec: Spec) -> str | None:
    """What the baseline is called in the tables; None where the threat model grants too little."""
    return next(iter(_baselines(labelled_attacks(spec))), None)


def victims(spec: Spec) -> list[tuple[int, int]]:
    """Which (round, client) are attacked: spread over the rounds, by seed, before any result."""
    orders = []
    for round_ in spec.audited_rounds:
        coin = np.random.default_rng([spec.seed, 11, round_])
        orders.append([(round_, int(c)) for c in coin.permutation(spec.cohort(round_))])
    wanted = spec.audit.victims or sum(len(order) for order in orders)
    spread = [order[i] for i in range(spec.cohort_size) for order in orders if i < len(order)]
    return sorted(spread[:wanted])


def jobs_of(run: Run, spec: Spec, chosen: Iterable[tuple[int, int]]) -> list[Job]:
    """Every job of these victims, attack by attack."""
    chosen, cast, played = list(chosen), cast_of(spec), roles(spec)
    folders = run.observations.absolute(), run.reconstructions.absolute()
    sample = min(victims(spec), default=None)
    jobs: list[Job] = []
    for label, component in labelled_attacks(spec):
        role = played.get(label)
        if role is not None and role.sample:
            on = [victim for victim in chosen if victim == sample]
            jobs += jobs_on(*folders, label, component, on, 1)
        else:
            jobs += jobs_on(*folders, label, component, chosen, trials_of(component, spec))
    if cast is None:
        return jobs
    staged = [replace(job, judged=True) for job in jobs]
    return staged if cast.exhaustive else list(_in_stages(staged, played))


def _in_stages(jobs: list[Job], played: Mapping[str, Role]) -> Iterator[Job]:
    """The jobs of a suite: each after those on the same victim that are cheaper, which may have
    recovered it."""

    def cheaper(job: Job, other: Job) -> bool:
        mine, its = played[job.label], played.get(other.label)
        if its is None or its.sample or its.member.kind == "beside":
            return False
        same = (job.victim, job.trial) == (other.victim, other.trial)
        return same and its.member.stage < mine.member.stage

    for job in jobs:
        role = played.get(job.label)
        if role is None or role.member.kind == "beside":
            yield job
        else:
            yield replace(job, after=tuple(o.result for o in jobs if cheaper(job, o)))


def trials_of(component: Component, spec: Spec) -> int:
    """How often an attack is tried on each victim; the baseline says the same every time."""
    return 1 if component.is_baseline else spec.audit.trials


def jobs_on(
    observations: Path,
    results: Path,
    label: str,
    component: Component,
    chosen: Iterable[tuple[int, int]],
    trials: int,
) -> list[Job]:
    """One attack on each of these observations, in every trial."""
    return [
        Job(observations, results, round_, client, component, label, trial)
        for round_, client in chosen
        for trial in range(trials)
    ]


def after_lessons(job: Job, learned: Path, taught: Sequence[int]) -> Job:
    """The job; if its attack learns, with its memory in the folder ``learned`` and the last lesson
    it needs where one follows each of the rounds ``taught``."""
    attack = create_attack(job.attack.name, **job.attack.params)
    traits = traits_of(attack)
    if traits.learner is None:
        return job
    memory = learned / traits.learner
    if traits.rehearses:
        number = 1 + taught.index(job.round)
    else:
        number = max(1, lessons_needed(attack, len(taught)))
    return replace(job, memory=memory, requires=lesson_path(memory, number))


def taught_rounds(component: Component, spec: Spec) -> list[int]:
    """The rounds after which an attack that learns has a lesson: all that are observed, or those
    that are attacked where it learns for each of them alone."""
    return spec.audited_rounds if rehearses(component) else observed_rounds(spec)


def rehearses(component: Component) -> bool:
    """Whether an attack learns for each attacked round alone."""
    return traits_of(create_attack(component.name, **component.params)).rehearses


def learners(spec: Spec) -> dict[str, tuple[str, Component]]:
    """The memories that this spec's attacks need, each with the attack that fills it."""
    by_memory: dict[str, tuple[str, Component]] = {}
    for label, component in labelled_attacks(spec):
        learner = traits_of(create_attack(component.name, **component.params)).learner
        if learner is not None:
            by_memory.setdefault(learner, (label, component))
    return by_memory


def memories(run: Run, spec: Spec) -> dict[str, Path]:
    """The memory of every attack that learns, by its label; empty before anything was learned."""
    if not run.learned.is_dir():
        return {}
    folders = {}
    for label, component in labelled_attacks(spec):
        learner = traits_of(create_attack(component.name, **component.params)).learner
        if learner is not None:
            folders[label] = run.learned / learner
    return folders


def observed_rounds(spec: Spec) -> list[int]:
    """The rounds whose observations are kept: the attacked ones, or all where an attack uses the
    traffic between them."""
    attacks = [create_attack(c.name, **c.params) for _, c in labelled_attacks(spec)]
    if any(reads_traffic(attack, granted_by(spec.threat)) for attack in attacks):
        return list(range(1, spec.train.rounds + 1))
    return spec.audited_rounds


def awaits_rounds(spec: Spec) -> bool:
    """Whether an attack weighs an update against the others of its round, as those do that tell
    members: asked before the round is over, it would see whatever had come in by then."""
    granted = granted_by(spec.threat)
    attacks = [create_attack(c.name, **c.params) for _, c in labelled_attacks(spec)]
    return CANDIDATES in granted and any(
        CANDIDATES in needs_of(attack) and reads_traffic(attack, granted) for attack in attacks
    )


def lessons_of(run: Run, spec: Spec, rounds: Iterable[int]) -> list[LessonJob]:
    """The lessons of every learner that follow these rounds."""
    wanted, observations = set(rounds), run.observations.absolute()
    return [
        lesson
        for name, (label, component) in learners(spec).items()
        for lesson in lessons_on(
            *(observations, run.learned.absolute() / name, label, component),
            taught_rounds(component, spec),
        )
        if lesson.round in wanted
    ]


def lessons_on(
    observations: Path, memory: Path, label: str, component: Component, rounds: Iterable[int]
) -> list[LessonJob]:
    """One lesson after each of these rounds; each requires the one before."""
    return [
        LessonJob(
            observations,
            memory,
            component,
            label,
            lesson,
            round_,
            lesson_path(memory, lesson - 1) if lesson > 1 else None,
        )
        for lesson, round_ in enumerate(rounds, start=1)
    ]


def load_surrogate(spec: Spec, *, at_hand: bool = True) -> Tensor | None:
    """Images of the attacker's own, where the spec names them, without any that clients hold: which
    those are can be seen where the clients' data set is ``at_hand``."""
    found = find_surrogate(spec, victims(spec), at_hand=at_hand)
    return None if found is None else found.apart().images


def _check_prior(spec: Spec) -> None:
    if spec.threat.prior is None:
        return
    if "priors" not in granted_by(spec.threat):
        raise SpecError(f"threat {spec.threat.model} grants no prior network; threat D does.")
    load_prior(spec.threat.prior)


def _check_generator(spec: Spec, classes: int) -> None:
    source = spec.threat.generator
    if source is None:
        attacks = [create_attack(c.name, **c.params) for _, c in labelled_attacks(spec)]
        if any("generator" in needs_of(attack) for attack in attacks):
            raise SpecError(
                "an attack needs a trained generator; say where it is: "
                "threat.generator.checkpoint=FILE."
            )
        return
    if "generator" not in granted_by(spec.threat):
        raise SpecError(f"threat {spec.threat.model} grants no generator; threat D does.")
    generator = load_generator(source, image_size=spec.data.image_size)
    known = int(getattr(generator, "num_classes", 0) or 0)
    if takes_labels(generator) and known < classes:
        raise SpecError(f"the generator knows {known} classes and the clients have {classes}.")
    told = generator_metadata(Path(source.checkpoint)).get("trained_on")
    path = told.get("path") if isinstance(told, dict) else None
    if isinstance(told, dict) and same_data(str(told.get("name")), path and str(path), spec.data):
        raise SpecError(
            "threat.generator was trained on the clients' own data; train it on other data."
        )


def _check_model(component: Component, model: nn.Module, public: Public) -> None:
    """Raise what the attack itself says of a model or a protocol that it cannot work on."""
    attack = create_attack(component.name, **component.params)
    try:
        with sealed():
            attack.check_model(model, public)
    except (AttackError, ModelError) as error:
        raise SpecError(f"the attack '{component.short_name}' cannot work here: {error}") from error


def _check_attack(component: Component, spec: Spec, *, willing: bool) -> None:
    """Raise what the attack itself refuses; if it learns across observations, also for more lessons
    than rounds, and for a single observation."""
    attack = create_attack(component.name, **component.params)
    try:
        with sealed():
            attack.check_spec(spec)
    except AttackError as error:
        if not willing:  # else it declines when it is asked
            short = component.short_name
            raise AttackError(f"the attack '{short}' cannot work here: {error}") from error
    traits = traits_of(attack)
    if traits.learner is not None and not traits.rehearses:
        lessons_needed(attack, len(observed_rounds(spec)))
        if spec.cohort_size * spec.train.rounds < 2:
            raise SpecError(
                f"the attack '{component.name}' learns across observations and would see one; "
                f"give it more clients or rounds."
            )
