"""Rules: each looks at the facts and says what it finds, with the numbers that decide it.

`certain`: it follows from the shapes and came back in rehearsal, or it is plain from the protocol.
`likely`: it leaks more than a guess, or the numbers could not be rehearsed. `note`: no leak by
itself, but something that readers of an audit of this spec should know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from fedsim.attacks import create_attack
from fedsim.campaign.plan import labelled_attacks
from fedsim.core.attack import needs_of
from fedsim.core.knowledge import THREATS, granted_by
from fedsim.core.spec import Upload
from fedsim.lint import active, training
from fedsim.lint.facts import ACTS, Facts, NamedDefense
from fedsim.lint.findings import Finding, Severity
from fedsim.lint.rehearsal import EXACT_DB
from fedsim.lint.remedies import (
    aggregated,
    aggregation_last,
    mixed,
    more_clients,
    with_attack,
    with_defense,
    without_defense,
)

Rule = Callable[[Facts], Iterator[Finding]]

CLEAR_DB = 30.0  # what a verdict calls LEAKS
_PASSIVE = (
    " Mixing pictures ends this for threats A to E; a server that chooses the weights (threat F) "
    "takes one out of any batch."
)
MOSTLY = 0.75  # of the pictures, for a rehearsal to count as exact
CLEAR_SHARE = 0.5  # of the batches, for labels to count as read
LOOSE, MEANINGLESS = 10.0, 100.0  # epsilon: little is promised; nothing is

NAMES = {
    **active.NAMES,
    **training.NAMES,
    "exact-inversion": "one picture, from the gradients of its positions and patches",
    "exact-inversion-fixed-positions": "one picture, although its positions are fixed",
    "layer-by-layer": "one picture, through a plain chain of layers",
    "whole-batch": "every picture of a batch, from a first linear layer before a ReLU",
    "bypassed-defense": "a defense in spite of which the picture comes back",
    "labels": "labels, from the head's gradient",
    "batch-statistics": "means and variances of the batch, from BatchNorm's buffers",
    "lonely-aggregation": "secure aggregation of one client",
    "order-of-defenses": "a defense that breaks the masks of the one before it",
    "replaced-gradient": "a defense whose work a later one throws away",
    "no-privacy-budget": "differential privacy without noise",
    "weak-privacy-budget": "differential privacy that promises little",
    "readable-mask": "a jigsaw whose mask is public",
    "exactness-ended": "what alone hides a picture that the equations determine",
    "fixed-positions-hold": "why fixed positions defend here",
    "aggregate-is-visible": "what secure aggregation leaves to see",
    "uploaded-in-clear": "what is uploaded beside a protected update",
    "unknown-defense": "a defense that is not one of fedsim's own",
    "oracle-labels": "attacks are given the true labels",
    "missing-attack": "an audit would miss what was found here",
    "first-round-only": "only fresh weights are audited",
    "absent-data": "the data set is not on this machine",
    "not-rehearsed": "shapes alone decide",
    "random-training": "a model that no replay can follow",
}


# -- pictures ------------------------------------------------------------------------------------


def exact_by_patches(facts: Facts) -> Iterator[Finding]:
    """Position embedding and patch projection of one picture: dW = G^T X."""
    tokens = facts.tokens
    if not facts.one_image or tokens is None:
        return
    if tokens.form != "patch_solve":
        return
    rank = min(tokens.patches, tokens.gradient_rank)
    shown = "" if tokens.uploads_patches else "an adapter on "
    system = (
        f"{_one_picture(facts)}, and the gradients of its positions and of {shown}its patch "
        f"projection are uploaded: one linear system of rank {rank} for {tokens.patches} patches "
        f"(width {tokens.width})."
    )
    yield from _inversion(
        facts, "exact-inversion", "patch_solve", tokens.solvable_by_patches, system
    )


def exact_by_rows(facts: Facts) -> Iterator[Finding]:
    """Positions that are fixed but known: the row space of the first attention's gradient."""
    tokens = facts.tokens
    if not facts.one_image or tokens is None or tokens.form != "row_space":
        return
    assert tokens.rows is not None
    gradient = "the first attention's gradient gives"
    whose = "adapters on the first attention give" if facts.adapted else gradient
    known = "Its positions are not uploaded one by one but"
    if not tokens.once:
        known = "The gradient of its positions is of several places, but they are"
    system = (
        f"{_one_picture(facts)}. {known} known, of rank {tokens.position_rank} for "
        f"{tokens.patches} patches, and {whose} {tokens.rows.equations} equations for "
        f"{tokens.rows.unknowns} unknowns a patch."
    )
    yield from _inversion(facts, "exact-inversion-fixed-positions", "row_space", True, system)


def _inversion(
    facts: Facts, rule: str, attack: str, determined: bool, system: str
) -> Iterator[Finding]:
    severity = _severity(facts, determined)
    if severity is None:
        return
    psnr = facts.rehearsal.psnr
    words = f" Rehearsed on {len(psnr)} made-up pictures: {_range(psnr)}." if psnr else ""
    if not psnr:
        words = f" Not rehearsed: {facts.rehearsal.declined}."
    needs = needs_of(create_attack(attack))
    letter = next(t.letter for t in THREATS.values() if needs <= t.grants)
    lacking = sorted(needs - granted_by(facts.spec.threat))
    if lacking:
        words += (
            f" This spec's attacker (threat {facts.spec.threat.model}) lacks {', '.join(lacking)}; "
            f"a server that knows them (threat {letter}) does not."
        )
    yield Finding(rule, severity, f"{system}{words}{_PASSIVE}", mixed(facts), letter)


def _severity(facts: Facts, determined: bool) -> Severity | None:
    psnr, bare = facts.rehearsal.psnr, facts.rehearsal.bare
    if not psnr:
        return "likely" if determined and not _acting(facts) else None
    exact = sum(value >= EXACT_DB for value in psnr) / len(psnr)
    if determined and (exact >= MOSTLY or (exact > 0 and _by_chance(facts.defenses))):
        return "certain"
    if determined and _sometimes_plain(facts) and min(bare) >= EXACT_DB:
        return "certain"  # rare in a rehearsal, but it happens
    return "likely" if max(psnr) >= CLEAR_DB else None


def _by_chance(named_defenses: Sequence[NamedDefense]) -> bool:
    return any(named.by_chance for named in named_defenses)


def _sometimes_plain(facts: Facts) -> bool:
    """Whether the one defense that acts says itself that it leaves some batches alone."""
    acting = _acting(facts)
    if len(acting) != 1 or not _by_chance(acting):
        return False
    return bool(getattr(acting[0].defense, "probability", 1.0) < 1)


def layer_by_layer(facts: Facts) -> Iterator[Finding]:
    """A plain chain of layers and one picture: R-GAP."""
    one_gradient = facts.spec.train.upload is Upload.GRADIENT and facts.one_image
    if not (facts.chain and one_gradient and facts.head) or _acting(facts):
        return
    reason = (
        f"{_one_picture(facts)}, and the model is a plain chain of layers without pooling or "
        f"skips: each layer's input solves two linear systems (R-GAP), as far as their rank goes."
    )
    yield Finding("layer-by-layer", "likely", reason, mixed(facts), "B")


def whole_batch(facts: Facts) -> Iterator[Finding]:
    """A first layer that is linear, and the zeros of the ReLU behind it: SPEAR."""
    train, units = facts.spec.train, facts.units
    one_gradient = train.upload is Upload.GRADIENT or train.optimizer == "sgd"
    if units is None or facts.steps != 1 or not one_gradient or _acting(facts):
        return
    batch = train.step_size
    if batch >= min(units, 3 * facts.spec.data.image_size**2):
        return
    reason = (
        f"The network begins with a linear layer of {units} units and a ReLU, whose gradient is "
        f"uploaded: its zeros tell the {batch} pictures of a batch apart, as far as there are many "
        f"more units than pictures. Mixing pictures in larger batches ends this late."
    )
    yield Finding("whole-batch", "likely", reason, aggregated(facts), "B")


def ended_by(facts: Facts) -> Iterator[Finding]:
    """What stands between a solvable system and its picture."""
    bare, psnr = facts.rehearsal.bare, facts.rehearsal.psnr
    if not bare or min(bare) < EXACT_DB or _certain_picture(facts):
        return
    best = max(psnr)
    names = ", ".join(named.name for named in _acting(facts))
    reason = (
        f"The equations determine the picture; {names} is all that hides it: rehearsed, a closed "
        f"form comes to {best:.0f} dB with it and to {min(bare):.0f} dB without. Attacks that "
        f"search for pictures are not covered by this."
    )
    yield Finding("exactness-ended", "note", reason)


def bypassed(facts: Facts) -> Iterator[Finding]:
    """Defenses that are in force while the picture still comes back."""
    if not _certain_picture(facts):
        return
    for named in facts.defenses:
        if named.by_chance:
            rate = getattr(named.defense, "probability", None)
            share = f" (each batch is shuffled with probability {rate:g})" if rate else ""
            why = f"leaves some batches as they are{share}, and those come back exactly"
        elif named.acts_on("toss"):
            why = "draws inside the network, behind the gradients that the closed form reads"
        elif named.acts_on("prepare_model"):
            why = "takes parts out of training, and what remains still determines the picture"
        elif named.acts_on("protect_update", "protect_gradient"):
            why = "leaves the equations between the layers' gradients as they were"
        elif named.acts_on("batch_gradient"):
            why = "does not change the gradients that the closed form reads"
        else:
            why = "does not touch what the closed form reads"
        reason = f"{named.name} {why}: one picture behind an update is recovered in spite of it."
        yield Finding("bypassed-defense", "certain", reason, mixed(facts))


def low_rank_positions(facts: Facts) -> Iterator[Finding]:
    """Why fixed positions do defend here: their rank, or too few equations."""
    tokens = facts.tokens
    fixed = tokens is not None and tokens.positions and not tokens.uploads_position
    if not fixed or tokens is None or not facts.one_image or tokens.solvable_by_rows:
        return
    if tokens.rows is None:
        why = "there is no first attention to read"
    elif tokens.rows.equations == 0 and not tokens.uploads_patches:
        why = "the patch projection is not uploaded either"
    elif tokens.position_rank < tokens.patches:
        why = f"they have rank {tokens.position_rank} for {tokens.patches} patches"
    else:
        why = (
            f"there are {tokens.rows.equations} equations for {tokens.rows.unknowns} unknowns a "
            f"patch"
        )
    reason = (
        f"The positions are not trained one by one, and no closed form here determines the "
        f"picture: {why}. A wider or finer model can change that."
    )
    yield Finding("fixed-positions-hold", "note", reason)


# -- labels and statistics -----------------------------------------------------------------------


def labels(facts: Facts) -> Iterator[Finding]:
    """The head's gradient is p - y: labels have a sign of their own."""
    rehearsal, train = facts.rehearsal, facts.spec.train
    if not facts.head:
        return
    single = train.step_size == 1 and (facts.steps == 1 or facts.one_image)
    where = "the head's bias" if "bias" in facts.head else "the rows of the head's weight"
    if rehearsal.declined is not None:
        if _acting(facts):
            return
        rehearsed, share = f"not rehearsed: {rehearsal.declined}", 1.0 if single else CLEAR_SHARE
    elif rehearsal.labels is None or rehearsal.labels < CLEAR_SHARE:
        return
    else:
        share = rehearsal.labels
        what = "the label" if rehearsal.batch == 1 else f"all {rehearsal.batch} labels"
        rehearsed = f"{what} read without a mistake in {share:.0%} of rehearsed batches"
    severity: Severity = "certain" if single and share == 1.0 else "likely"
    what = "Its label is" if single else "Which labels a batch holds, and how often, is"
    more = "" if "bias" in facts.head or single else " Repeated labels do not show there."
    steps = "" if facts.steps == 1 else " Several local steps blur the counts."
    reason = f"{what} read from {where}: only a class that is there can be negative ({rehearsed})."
    remedy = aggregated(facts) or with_defense(facts, {"name": "withheld", "parts": ["head"]})
    yield Finding("labels", severity, reason + more + steps, remedy, "B")


def batch_statistics(facts: Facts) -> Iterator[Finding]:
    """Running statistics before and after: their difference is the private batch's."""
    train = facts.spec.train
    if not facts.batchnorms or train.batchnorm != "shared" or train.mode != "train":
        return
    exact = facts.steps == 1
    how = (
        "after one step, the mean and variance of the batch as the model saw it follow exactly"
        if exact
        else "after several steps, a mixture of the batches' means and variances follows"
    )
    reason = (
        f"The running statistics of {facts.batchnorms} BatchNorm layers are uploaded: from them "
        f"and those that were sent, {how}. No defense changes them."
    )
    severity: Severity = "certain" if exact else "likely"
    yield Finding("batch-statistics", severity, reason, ("train.batchnorm=local",), "A")


# -- defenses ------------------------------------------------------------------------------------


def lonely_aggregation(facts: Facts) -> Iterator[Finding]:
    """A sum of one is its summand; a sum of few is little cover."""
    named = facts.named("secure_aggregation")
    if named is None:
        return
    cohort = facts.spec.cohort_size
    if cohort == 1:
        reason = (
            "secure_aggregation sums one client a round: there is nobody to share a mask with, "
            "and the sum is that client's update."
        )
        yield Finding("lonely-aggregation", "certain", reason, more_clients(facts))
    else:
        reason = (
            f"secure_aggregation shows the server sums of {cohort} clients: what it hides among "
            f"them it hides no better than a batch of {cohort} times the pictures would, and "
            f"{cohort - 1} clients who collude with the server uncover the last."
        )
        yield Finding("aggregate-is-visible", "note", reason)
    after = facts.defenses[facts.defenses.index(named) + 1 :]
    for later in after:
        if later.acts_on("protect_update"):
            reason = (
                f"{later.name} stands after secure_aggregation and changes numbers that are masked "
                f"already: the masks no longer cancel, and the sum is of no use."
            )
            yield Finding("order-of-defenses", "likely", reason, aggregation_last(facts))


def replaced_gradient(facts: Facts) -> Iterator[Finding]:
    """Of several defenses that compute a batch's gradient themselves, the last one counts."""
    rivals = [named for named in facts.defenses if named.acts_on("batch_gradient")]
    for named in rivals[:-1]:
        reason = (
            f"{named.name} and {rivals[-1].name} both compute the batch's gradient; the later one "
            f"replaces the earlier, so {named.name} protects nothing."
        )
        remedy = without_defense(facts, rivals[-1].name)
        yield Finding("replaced-gradient", "certain", reason, remedy)


def budget(facts: Facts) -> Iterator[Finding]:
    """Differential privacy that promises nothing."""
    promising = [named for named in facts.defenses if named.acts_on("budget")]
    if not promising or not facts.data_here:
        return
    from fedsim.scoring.budgets import budgets  # the accountant takes seconds to import

    for entry in budgets(facts.spec):
        name, epsilon = entry["defense"], entry["epsilon"]
        # DP-SGD refuses BatchNorm.
        fits = not facts.batchnorms
        remedy = with_defense(facts, {"name": "dp_sgd"}, instead=name) if fits else ()
        if epsilon is None or not math.isfinite(epsilon):
            reason = (
                f"{name} adds no noise: its budget is infinite, and clipping alone hides nothing."
            )
            yield Finding("no-privacy-budget", "certain", reason, remedy)
        elif epsilon > LOOSE:
            severity: Severity = "likely" if epsilon > MEANINGLESS else "note"
            reason = (
                f"{name} spends epsilon {epsilon:.3g} at delta {entry['delta']:g} over "
                f"{facts.spec.train.rounds} rounds ({entry['protects']}): a guarantee means little "
                f"above {LOOSE:g} and nothing above {MEANINGLESS:g}."
            )
            yield Finding("weak-privacy-budget", severity, reason, remedy)


def clear_text_beside(facts: Facts) -> Iterator[Finding]:
    """The loss and the number of examples travel unprotected."""
    careful = [g.name for g in facts.defenses if g.acts_on("budget", "reveal")]
    if careful:
        whose = " of one picture" if facts.one_image else ""
        reason = (
            f"{' and '.join(careful)} does not cover what is uploaded beside the update: the mean "
            f"training loss{whose} and the number of examples."
        )
        yield Finding("uploaded-in-clear", "note", reason)


def readable_mask(facts: Facts) -> Iterator[Finding]:
    """A place whose position got no gradient was hidden."""
    named, tokens = facts.named("mjp"), facts.tokens
    if named is None or tokens is None or not tokens.uploads_position:
        return
    if facts.spec.train.upload is not Upload.GRADIENT or not getattr(
        named.defense, "unknown", False
    ):
        return
    rest = round((1 - getattr(named.defense, "ratio", 1.0)) * tokens.patches)
    reason = (
        f"mjp's mask is public: hidden places have position gradients of exactly zero. The other "
        f"{rest} of {tokens.patches} patches keep equations of their own."
    )
    severity: Severity = "likely" if facts.one_image and rest else "note"
    yield Finding("readable-mask", severity, reason, mixed(facts) if severity == "likely" else ())


def strangers(facts: Facts) -> Iterator[Finding]:
    """Defenses by import path: what they mean to do is not known here."""
    for named in facts.defenses:
        if ":" in named.name:
            hooks = [h for h in (*ACTS, "prepare_model", "choose", "penalty") if named.acts_on(h)]
            judged = "the rehearsal ran with it" if facts.rehearsal.declined is None else "unjudged"
            reason = (
                f"{named.name} is not one of fedsim's own: it overrides "
                f"{', '.join(hooks) or 'no hook'}; {judged}, and nothing else is known of it."
            )
            yield Finding("unknown-defense", "note", reason)


# -- the audit itself ----------------------------------------------------------------------------


def oracle(facts: Facts) -> Iterator[Finding]:
    if facts.spec.threat.oracle_labels:
        reason = "threat.oracle_labels hands attacks the true labels: scores are an upper bound."
        yield Finding("oracle-labels", "note", reason, ("threat.oracle_labels=false",))


def missing_attack(facts: Facts) -> Iterator[Finding]:
    """A leak that this spec's own attacks would not show."""
    named = {component.name for _, component in labelled_attacks(facts.spec)}
    wanted = {"exact-inversion": "patch_solve", "exact-inversion-fixed-positions": "row_space"}
    wanted["whole-batch"] = "spear"
    for finding in [*exact_by_patches(facts), *exact_by_rows(facts), *whole_batch(facts)]:
        attack = wanted[finding.rule]
        if attack not in named:
            reason = f"An audit of this spec would miss it: {attack} is not among its attacks."
            yield Finding("missing-attack", "note", reason, with_attack(facts, attack))


def first_round_only(facts: Facts) -> Iterator[Finding]:
    if facts.spec.audited_rounds == [1]:
        reason = (
            "Only the first round is audited: gradients of fresh weights are the largest and the "
            "easiest to invert, so this says little of later rounds, and nothing of what several "
            "rounds give away together."
        )
        wanted = ("train.rounds=5", "audit.rounds=null")
        yield Finding("first-round-only", "note", reason, wanted)


def absent_data(facts: Facts) -> Iterator[Finding]:
    if not facts.data_here:
        reason = (
            f"The data set '{facts.spec.data.name}' is not on this machine: {facts.classes} "
            f"classes are assumed, clients are taken to hold enough samples, and budgets are not "
            f"counted."
        )
        yield Finding("absent-data", "note", reason)


def unrehearsed(facts: Facts) -> Iterator[Finding]:
    if facts.rehearsal.declined is not None:
        reason = f"Nothing could be rehearsed, so shapes alone decide: {facts.rehearsal.declined}."
        yield Finding("not-rehearsed", "note", reason)


def random_training(facts: Facts) -> Iterator[Finding]:
    """Dropout, stochastic depth: the coin is the client's own."""
    if facts.tosses:
        reason = (
            "The model leaves parts out at random while it is trained (dropout, stochastic depth): "
            "the coin is the client's own, so its updates cannot be replayed and the canary will "
            "call attacks mis-specified. Set its rates to 0 in model.options, or train.mode=eval."
        )
        yield Finding("random-training", "note", reason)


def active_server(facts: Facts) -> Iterator[Finding]:
    """One picture of any batch, for a server that chooses the weights."""
    return active.active_server(facts, (exact_by_patches, exact_by_rows, layer_by_layer))


RULES: tuple[Rule, ...] = (
    exact_by_patches,
    exact_by_rows,
    layer_by_layer,
    whole_batch,
    bypassed,
    labels,
    batch_statistics,
    lonely_aggregation,
    replaced_gradient,
    budget,
    readable_mask,
    ended_by,
    low_rank_positions,
    clear_text_beside,
    strangers,
    oracle,
    missing_attack,
    first_round_only,
    absent_data,
    unrehearsed,
    random_training,
    active_server,
    active.guards_only_warn,
    training.augmented,
    training.idle_proximal,
    training.partial_training,
)


# -- words --------------------------------------------------------------------------


def _one_picture(facts: Facts) -> str:
    train = facts.spec.train
    if facts.steps == 1:
        same = (
            ", which is its gradient times the learning rate"
            if train.upload is Upload.DELTA
            else ""
        )
        return f"One picture stands behind an update{same} (batch_size 1, one step)"
    return f"One picture stands behind {facts.steps} local steps, whose sum keeps its equations"


def _range(values: Sequence[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return f"{low} dB" if low == high else f"{low} to {high} dB"


def _acting(facts: Facts) -> list[NamedDefense]:
    return [named for named in facts.defenses if named.acts_on(*ACTS)]


def _certain_picture(facts: Facts) -> bool:
    findings = [*exact_by_patches(facts), *exact_by_rows(facts)]
    return any(finding.severity == "certain" for finding in findings)
