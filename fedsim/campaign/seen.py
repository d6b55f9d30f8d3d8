"""Seen: an observation as its server reads it.

Where a cohort masks its uploads, one of them alone is noise, and the server reads their sum: the
mean update of the cohort, which is that of a larger batch. Whoever is not the server, and does not
know of the masks, has the noise. Where the server chose the weights, its manoeuvre says what the
update then means.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.core.defense import Defense
from fedsim.core.errors import AttackError, FedsimError
from fedsim.core.manoeuvre import Isolated, Sighting
from fedsim.core.observation import (
    Observation,
    is_finite,
    read_observation,
    read_reply,
    recorded_cohort,
)
from fedsim.core.run import address_of, observation_path
from fedsim.core.seal import sealed
from fedsim.core.spec import Component
from fedsim.defenses.applied import announced, declared, hiding


def read_from(path: Path, granted: frozenset[str]) -> list[Path]:
    """The observations that somebody with this knowledge reads an update from: its own, or those of
    all who masked theirs together and stayed in."""
    defenses, cohort = recorded_cohort(path)
    if not cohort or "defenses" not in granted or hiding(declared(defenses)) is None:
        return [path]
    round_, _ = address_of(path)
    files = [
        observation_path(path.parent.parent, round_, member).with_suffix(".json")
        for member in cohort
    ]
    return [file for file in files if file.is_file() and is_finite(file)] or [path]


def read_seen(path: Path, granted: frozenset[str]) -> Observation:
    """An observation with the update that somebody with this knowledge can read."""
    observation = read_observation(path)
    mask = hiding(declared(observation.public.defenses))
    if mask is None or not observation.cohort or "defenses" not in granted:
        return observation
    return _revealed(observation, read_from(path, granted), mask)


def _revealed(observation: Observation, files: list[Path], mask: Defense) -> Observation:
    """The mean of a cohort in place of one masked upload, as the update of a larger batch."""
    stayed = [address_of(file)[1] for file in files]
    uploads = [read_reply(file) for file in files]
    total = dict(uploads[0].tensors)
    for upload in uploads[1:]:
        total = {name: tensor + upload.tensors[name] for name, tensor in total.items()}
    sums = mask.reveal(total, observation.round, observation.cohort, stayed) or {}
    mean = {name: tensor / len(stayed) for name, tensor in sums.items()}
    public = replace(observation.public, batch_size=observation.public.batch_size * len(stayed))
    update = replace(
        observation.update,
        tensors=mean,
        num_examples=sum(upload.num_examples for upload in uploads),
    )
    return replace(observation, update=update, public=public, stayed=tuple(stayed))


def isolated_in(observation: Observation, granted: frozenset[str]) -> Isolated | None:
    """What the update means after the manoeuvre by which its weights were chosen; None where it is
    to be read as it came."""
    if observation.chosen is None or "tampering" not in granted:
        return None
    if not all(tensor.is_floating_point() for tensor in observation.update.tensors.values()):
        return None  # masked: to this reader it is noise
    component = Component.model_validate(observation.chosen.manoeuvre)
    manoeuvre = create_manoeuvre(component.name, **component.params)
    public = observation.public
    alone = replace(public, batch_size=public.batch_size // observation.summed)
    seen = Sighting(
        *(observation.round, observation.client, observation.weights, observation.update.widened()),
        about=observation.chosen.about,
        model=partial(announced, public),
        public=alone,
        pictures=observation.pictures,
        stayed=observation.stayed,
    )
    try:
        with sealed():
            found = manoeuvre.isolate(seen)
    except FedsimError:
        raise
    except Exception as error:  # its author's
        raise AttackError(
            f"the manoeuvre '{component.name}' could not say what is left of the batch: "
            f"{type(error).__name__}: {error}"
        ) from error
    if found is not None and not 0 <= found.pictures <= observation.pictures:
        raise AttackError(
            f"the manoeuvre says that {found.pictures} pictures remain, and at most "
            f"{observation.pictures} stand behind the update."
        )
    return found
