"""Captured: the audit of somebody's own app, from what its server and its witnesses kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedsim.audit.stages import audit
from fedsim.audit.trust import announced_in, import_paths, named_in, refuse_strangers
from fedsim.campaign.progress import Watch
from fedsim.captures.binding import Album, Bound, asked_in, bind
from fedsim.captures.log import captured_elsewhere, is_capture, read_head, read_messages
from fedsim.captures.passes import Pass, read_passes
from fedsim.captures.settling import Wanted, copied, find_app, own_word, settle
from fedsim.captures.witness import settle_witnesses, witness_folder
from fedsim.core.device import resolve_device
from fedsim.core.errors import FedsimError, RunError, SpecError
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path, truth_path
from fedsim.core.spec import Spec, load_spec
from fedsim.core.vault import Truth, Vault
from fedsim.scoring.canary import UNLEARNABLE, captured_canary, tolerance_of


def audit_captured(
    root: str | Path,
    source: Any = None,
    overrides: Iterable[str] = (),
    *,
    attacks: Iterable[Mapping[str, Any]] = (),
    vaults: Iterable[Path] = (),
    output: str | Path | None = None,
    watch: Watch | None = None,
    trust: bool = False,
) -> Run:
    """The attacks on a captured run, its scores where there is truth, its report.

    ``source`` is a YAML file or a mapping with attacks, threat and what else a spec has, and
    ``overrides`` are of the same; ``vaults`` are folders with what witnesses elsewhere kept. With
    ``output``, all is done in that directory, and the capture stays as it is.
    """
    run, spec = settled(root, source, overrides, attacks=attacks, output=output, trust=trust)
    with run.locked():
        bring_truths(run, spec, [Path(folder) for folder in vaults])
    return audit(spec, run.root, watch=watch, willing=True)


def settled(
    root: str | Path,
    source: Any = None,
    overrides: Iterable[str] = (),
    *,
    attacks: Iterable[Mapping[str, Any]] = (),
    output: str | Path | None = None,
    trust: bool = False,
) -> tuple[Run, Spec]:
    """A captured directory as a run with a spec: that of what is declared and of what is wanted."""
    captured = Run(found(root))
    wanted = Wanted.of(source, overrides)
    if named := [dict(attack) for attack in attacks]:
        wanted.sections["attacks"] = named
    _refuse_imports(captured, wanted, trust=trust)
    with captured.locked():
        run = captured
        if output is not None and Path(output).absolute() != captured.root.absolute():
            run = copied(captured, Path(output))
        return run, settle(run, wanted)


def is_own(run: Run) -> bool:
    """Whether this user captured the run, so that what it names is theirs; then its app's folder is
    looked into. What is named beside what was captured has to be said."""
    if not is_capture(run.root) or not own_word(run):
        return False
    head = read_head(run.root)
    said = _named({"model": head.model, "defenses": head.defenses}) | _named(head.added)
    if named_in(run) - said:
        return False
    find_app(run)
    return True


def found(root: str | Path) -> Path:
    """The directory of a capture; where it is not here, the error says where it is."""
    path = Path(root)
    if is_capture(path):
        return path
    other = captured_elsewhere(str(root))
    where = f"; one of that name is in '{other}'" if other is not None else ""
    raise RunError(f"'{root}' holds no capture{where}.")


def _refuse_imports(run: Run, wanted: Wanted, *, trust: bool) -> None:
    """Raise where the capture names code that neither its capturer nor this user did; of those who
    did, the app's folder is looked into. Only what is signed is the capturer's word: what else
    lies in the directory may be anybody's."""
    if trust:
        find_app(run)
        return
    head = read_head(run.root)
    own = _named(wanted.sections)
    named = _named({"model": head.model, "defenses": head.defenses}) | _named(head.added)
    if own_word(run):
        find_app(run)
        own |= named
    if run.spec_path.is_file():
        named |= named_in(run)
    named |= announced_in(run.observations)
    refuse_strangers(run.root, named, own)


def _named(sections: Mapping[str, Any]) -> set[str]:
    parts = ("model", "defenses", "attacks", "threat", "server", "guards", "data")
    known = {key: value for key, value in sections.items() if key in parts}
    try:
        return import_paths(load_spec(known))
    except SpecError:
        return set()


def bring_truths(run: Run, spec: Spec, vaults: list[Path]) -> None:
    """Put what the witnesses saw beside the observations that it is the truth of."""
    settle_witnesses()
    head = read_head(run.root)
    folders = vaults
    if head.run_id is not None:
        folders = [*vaults, witness_folder() / str(head.run_id)]
    passes, wrong = read_passes(folders, head.run_id)
    for words in wrong:
        run.note("witness_lost", f"a witness's file cannot be read: {words}")
    rounds, _ = read_messages(run.root)
    asked = [one for one in asked_in(rounds) if one.client in spec.cohort(one.round)]
    bound, unbound = bind(asked, passes, head.host)
    for one, why in unbound:
        where = {"round": one.round, "client": one.client}
        words = f"there is no truth for client {one.client} in round {one.round}: {why}"
        run.note("truth_unbound", words, **where)
    _check_size(run, spec, bound)
    _check_colours(run, spec, passes)
    album = Album(passes, spec.data.mean, spec.data.std)
    for each in bound:
        _bring(run, spec, album, each)


def _bring(run: Run, spec: Spec, album: Album, bound: Bound) -> None:
    asked = bound.asked
    if truth_path(run.vault, asked.round, asked.client).is_file():
        return
    where = {"round": asked.round, "client": asked.client}
    path = observation_path(run.observations, asked.round, asked.client)
    try:
        observation = read_observation(path)
        truth = _chosen(spec, album, bound, observation)
        if truth is None:
            words = f"the truth of client {asked.client} in round {asked.round} is not whole"
            run.note("truth_unbound", words, **where)
            return
        Vault(run.vault).write(asked.round, asked.client, truth)
    except FedsimError as error:
        run.note("truth_unbound", f"{error}", **where)


def _chosen(spec: Spec, album: Album, bound: Bound, observation: Any) -> Truth | None:
    """The truth; where a loader was left before its end, its last batch may have been fetched and
    not used, and the declared steps, or the replay, tell."""
    accumulate = spec.train.accumulate

    def of(one: Bound, *, drop_last: bool = False) -> Truth | None:
        return album.truth(one, observation.checksum, drop_last=drop_last, accumulate=accumulate)

    whole = of(bound)
    passes = bound.passes
    device = resolve_device(spec.engine.device)
    for few in _fewer(spec, passes):
        truth = of(replace(bound, passes=few))
        if truth is not None and _holds(observation, truth, device):
            return truth
    if whole is None or all(one.about.exhausted for one in passes):
        return whole
    short = of(bound, drop_last=True)
    if short is None:
        return whole
    steps = observation.public.local_steps
    if spec.train.local_steps and steps in (len(whole.batches), len(short.batches)):
        return whole if len(whole.batches) == steps else short
    errors = [_error(observation, truth, device) for truth in (whole, short)]
    return short if errors[1] < errors[0] else whole


def _fewer(spec: Spec, passes: tuple[Pass, ...]) -> list[tuple[Pass, ...]]:
    """Where they went through it more often than they say, maybe to measure: the passes before
    that, or afterwards."""
    counts = range(1, len(passes))
    parts = [part for n in counts for part in (passes[:n], passes[-n:])]
    if spec.train.local_steps:
        wanted = spec.train.local_steps * spec.train.accumulate
        return [part for part in parts if sum(len(p.about.rows) for p in part) == wanted]
    return [part for part in parts if len(part) == spec.train.local_epochs]


def _holds(observation: Any, truth: Truth, device: torch.device) -> bool:
    return _error(observation, truth, device) <= tolerance_of(observation.public.protocol)


def _error(observation: Any, truth: Truth, device: torch.device) -> float:
    """The canary's; where there is none, as far off as can be."""
    try:
        return captured_canary(observation, truth, device)
    except (FedsimError, *UNLEARNABLE):
        return float("inf")


def _check_size(run: Run, spec: Spec, bound: Iterable[Bound]) -> None:
    """Raise where every picture that was learned from is of another size than was declared: an
    attack would look for what cannot be compared with them."""
    passes = [one for each in bound for one in each.passes]
    sizes = {p.shape[-2:] for one in passes for p in (one.stored, one.loose) if len(p)}
    rows, side = sizes.pop() if len(sizes) == 1 else (0, 0)
    if rows and rows == side != spec.data.image_size:
        raise SpecError(
            f"the clients of '{run.root}' learned from pictures of {side} x {side}, and "
            f"data.image_size is {spec.data.image_size}: declare data.image_size={side}."
        )


def _check_colours(run: Run, spec: Spec, passes: Iterable[Pass]) -> None:
    """Tell where witnesses were told of another normalisation than the capture, or where pictures
    that are brought back by the declared one cannot have been any."""
    for one in itertools.islice(passes, 1000):
        about = one.about
        told = (about.mean, about.std)
        if about.stored and told != ([*spec.data.mean], [*spec.data.std]):
            words = f"a witness was told mean {about.mean} and std {about.std}, and the capture not"
            run.note("normalisation", words)
            return
        if about.loose and one.loose.is_floating_point():
            mean = one.loose.new_tensor(spec.data.mean).view(1, -1, 1, 1)
            std = one.loose.new_tensor(spec.data.std).view(1, -1, 1, 1)
            if one.loose.shape[1] != 3:
                continue
            pixels = one.loose * std + mean
            if float(pixels.min()) < -0.01 or float(pixels.max()) > 1.01:
                words = (
                    f"pictures that were seen lie outside [0, 1] once data.mean and data.std are "
                    f"taken back ({float(pixels.min()):.2f} to {float(pixels.max()):.2f}): declare "
                    f"those of the app"
                )
                run.note("normalisation", words)
                return
