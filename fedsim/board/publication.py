"""Publication: what the owner of a run hands out so that others can attack it.

Everything is written anew from a list of what may go: of each observation what the server saw of
it, and what the protocol makes public. What is not on the list does not travel: no vault and no
key, nothing that was reconstructed, learned or scored, no seed (simulated clients draw their
batches and their noise from it), no path of the owner's, and no file that somebody laid beside the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsim.board.submission import EXPORT, FORMAT
from fedsim.core.errors import RunError
from fedsim.core.files import (
    checksum,
    read_json,
    read_tensors,
    save_tensors,
    write_atomically,
    write_json,
)
from fedsim.core.observation import FORMAT as OBSERVED
from fedsim.core.observation import (
    as_kept,
    is_finite,
    read_observation,
    read_weights,
    refuse_foreign,
    update_checksum,
)
from fedsim.core.run import (
    Run,
    address_of,
    list_observations,
    observation_name,
    observation_path,
    paths,
    sent_path,
    weights_path,
)
from fedsim.core.sent import Places
from fedsim.core.spec import Spec
from fedsim.core.text import encoded

FEDERATION = "federation.yaml"
GUESSABLE = 2**32  # a seed below is found by trying
ARCHITECTURE = ("name", "options", "init", "pretrained")
# What may go of each section of the spec.
SECTIONS: dict[str, tuple[str, ...]] = {
    "data": ("name", "image_size", "clients", "mean", "std"),
    "model": ARCHITECTURE,
    "threat": ("model", "withhold"),
    "server": ("manoeuvre", "aggregate", "rounds", "clients"),
}
WHOLE = ("train", "defenses")  # what the server announces


@dataclass(frozen=True)
class Published:
    """Where it lies, how many observations it has, and what its owner should know."""

    root: Path
    observations: int
    notes: list[str]


def publish(run: Run, output: str | Path) -> Published:
    """`fedsim board export`: the observations of a run and what is public of it, in a directory of
    their own."""
    output, spec = Path(output), run.spec
    _refuse(run, output)
    files = [path for path in list_observations(run.observations) if is_finite(path)]
    if not files:
        raise RunError(f"'{run.root}' has no observation to publish.")
    folder, about = output / paths.OBSERVATIONS, {}
    for round_ in sorted({address_of(path)[0] for path in files}):
        here = [path for path in files if address_of(path)[0] == round_]
        _publish_weights(run.observations, folder, round_, here)
        for path in here:
            refuse_foreign(path, spec, run.classes)
            about[observation_name(*address_of(path))] = _publish_observation(path, folder)
    content = _federation(spec)
    write_atomically(output / FEDERATION, encoded(yaml.safe_dump(content, sort_keys=False)))
    # Last: it says that the rest is there.
    entry = {"format": FORMAT, "spec": spec.digest(), "observations": about}
    write_json(output / EXPORT, entry)
    return Published(output, len(files), list(_notes(run, content)))


def _refuse(run: Run, output: Path) -> None:
    here, there = output.resolve(), run.root.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise RunError(f"'{output}' is where the run lies; publish into a directory of its own.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunError(f"'{output}' holds something else; choose another directory.")


def _publish_weights(source: Path, folder: Path, round_: int, files: list[Path]) -> None:
    """What the server sent in a round, and what it sent some in its place; not what a manoeuvre
    remembers."""
    weights = read_weights(weights_path(source, round_), round_)
    target = weights_path(folder, round_)
    save_tensors(target, weights)
    about = {"format": OBSERVED, "round": round_, "checksum": checksum(weights)}
    write_json(target.with_suffix(".json"), about)
    here = source / target.parent.name
    for number in sorted({n for path in files for n in _places(path).files.values()}):
        sent, _ = read_tensors(sent_path(here, number))
        if sent.keys() - weights.keys():
            raise RunError(f"'{sent_path(here, number)}' holds more than what was sent.")
        save_tensors(sent_path(target.parent, number), sent)


def _publish_observation(path: Path, folder: Path) -> dict[str, Any]:
    """One observation as its server saw it; returns what others must know to submit pictures."""
    seen = read_observation(path)  # whole, and where it belongs
    if update_checksum(seen.update) != seen.checksum:
        raise RunError(f"the observation '{path}' holds more than an update.")
    public = asdict(seen.public)
    public["architecture"] = _only(ARCHITECTURE, public["architecture"])
    told = {
        "format": OBSERVED,
        "round": seen.round,
        "client": seen.client,
        "kind": seen.update.kind,
        "num_examples": seen.update.num_examples,
        "loss": seen.update.loss,
        "finite": True,
        **public,
        "checksum": seen.checksum,
        "cohort": list(seen.cohort),
    }
    if seen.chosen is not None:
        told["chosen"] = seen.chosen.model_dump(mode="json")
    if (places := _places(path)) != Places() or seen.chosen is not None:
        told["sent"] = places.model_dump(mode="json")
    target = observation_path(folder, seen.round, seen.client)
    save_tensors(target, as_kept(seen.update))
    write_json(target.with_suffix(".json"), told)
    side = seen.public.image_size
    return {"checksum": seen.checksum, "pictures": seen.pictures, "shape": [3, side, side]}


def _places(path: Path) -> Places:
    """Where what a client was sent in place of the round's weights lies."""
    return Places.model_validate(read_json(path).get("sent") or {})


def _federation(spec: Spec) -> dict[str, Any]:
    """What is public of a spec, section by section."""
    content = spec.model_dump(mode="json")
    shown = {name: _only(keys, content[name]) for name, keys in SECTIONS.items()}
    return {**shown, **{name: content[name] for name in WHOLE}}


def _only(keys: tuple[str, ...], content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content[key] for key in keys if key in content}


def _notes(run: Run, content: Mapping[str, Any]) -> Iterator[str]:
    """What an owner may have overlooked."""
    spec = run.spec
    simulated = not run.deployed and spec.captured is None
    if simulated and spec.seed < GUESSABLE:
        yield (
            f"the seed of this run, {spec.seed}, can be guessed, and whoever does draws what its "
            f"simulated clients drew; for others to attack, take a long random one"
        )
    if simulated and spec.data.path is None:
        yield (
            f"the pictures of '{spec.data.name}' are public: whoever has them can look for those "
            f"behind an update instead of reconstructing them"
        )
    for where in sorted(set(_places_named(content, ""))):
        yield f"{FEDERATION} names a path of this machine in {where}; look at it before you publish"


def _places_named(value: Any, where: str) -> Iterator[str]:
    """The keys under which a path stands."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        yield where
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _places_named(inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _places_named(inner, where)
