"""Files of a run, of generators and of data sets, damaged in any way: a value, or one sentence.
No pickle is ever opened."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedsim.attacks.generators import (
    create_generator,
    generator_metadata,
    image_size_of,
    load_generator,
)
from fedsim.audit.trust import announced_in
from fedsim.campaign.plan import jobs_of, victims
from fedsim.clients.data.pickles import read_pickle
from fedsim.clients.data.pictures import DAMAGED, decode
from fedsim.core.attack import Reconstruction
from fedsim.core.files import read_json, save_tensors
from fedsim.core.notebook import Notebook
from fedsim.core.observation import check_observation, is_finite, read_observation
from fedsim.core.run import Run
from fedsim.core.spec import GeneratorSpec
from fedsim.core.vault import Vault
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.scoring.canary import check_canaries
from fedsim.scoring.scores import failures
from tests.fuzz.inputs import SOME_JSON, altered, edits, tensors
from tests.fuzz.meeting import Check, Loaders, file_bytes, fuzz, harmless, with_file
from tests.layouts import load

FEW = 115
SMALL = {"image_size": 8, "latent_size": 4, "width": 2}
STATE = create_generator("dcgan", SMALL).state_dict()


# -- files of a run -------------------------------------------------------------------------------


def observation_of(run: Run) -> Path:
    return run.observations / "round-0001" / "client-0000.json"


def truth_of(run: Run) -> Path:
    return run.vault / "round-0001" / "client-0000.safetensors"


def result_of(run: Run) -> Path:
    return run.reconstructions / "prior_only/round-0001/client-0000-trial-0.safetensors"


def state_of(run: Run) -> Path:
    return truth_of(run).with_suffix(".state.safetensors")


def truth(run: Run) -> object:
    return Vault(run.vault).read(1, 0).replay()


def state(run: Run) -> object:
    return Vault(run.vault).read_state(2, 0)


def observation_bytes(which: str) -> Check:
    def check(edit: Callable[[bytes], bytes], run: Run) -> None:
        about = observation_of(run)
        path = about.parent / which
        calls = [lambda: read_observation(about), lambda: check_observation(about)]
        calls += [lambda: announced_in(run.observations)]
        with_file(path, edit(path.read_bytes()), *calls, lambda: is_finite(about))

    return check


def observation_tree(value: Any, run: Run) -> None:
    path = observation_of(run)
    calls = [lambda: read_observation(path), lambda: announced_in(run.observations)]
    with_file(path, json.dumps(value).encode(), *calls)


def sealed_file(find: Callable[[Run], Path], read: Callable[[Run], object]) -> Check:
    """A file that is whole, and holds tensors and words that nobody would write."""

    def check(value: tuple[dict[str, Tensor], str], run: Run) -> None:
        whole = run.root / "whole.safetensors"
        words = dict.fromkeys(("about", "rounds", "generator"), value[1])
        save_tensors(whole, value[0], words)
        with_file(find(run), whole.read_bytes(), lambda: read(run))

    return check


def read_small_files(edit: Callable[[bytes], bytes], run: Run) -> None:
    """What is read back without tensors: canaries, failures, events, tables."""
    spec = run.spec
    jobs = jobs_of(run, spec, victims(spec))
    jobs[0].failure.write_bytes(edit(b'{"job": "x", "attack": "x", "kind": "x", "reason": "x"}'))
    canaries = run.root / "canaries.json"
    held = canaries.read_bytes()
    with_file(canaries, edit(held), lambda: check_canaries(run, []), lambda: failures(jobs))
    events = run.root / "events.jsonl"
    events.write_bytes(edit(b'{"kind": "x", "message": "y"}\n{"kind": "x", "message": "z"}\n'))
    harmless(lambda: run.note("test", "another"))
    events.unlink()
    with_file(run.root / "scores.csv", edit(b"round,client\n1,2\n"), lambda: run.scores)
    with_file(run.root / "summary.json", edit(b'{"verdicts": []}'), lambda: run.summary)
    with_file(run.root / "run.json", edit(b'{"digest": "x"}'), lambda: Run.open(run.root))
    jobs[0].failure.unlink()


# -- generators and data sets ---------------------------------------------------------------------


def generator_of(run: Run) -> Path:
    path = run.root / "generator.safetensors"
    if not path.is_file():
        about = {"name": "dcgan", "options": SMALL, "trained_on": {"name": "photos", "path": None}}
        save_tensors(path, STATE, {"generator": json.dumps(about)})
    return path


def read_generator(run: Run) -> None:
    path = generator_of(run)
    harmless(lambda: generator_metadata(path))
    harmless(lambda: load_generator(GeneratorSpec(checkpoint=str(path)), image_size=8))
    size = image_size_of(path)
    load_generator(GeneratorSpec(checkpoint=str(path)), image_size=size)


def scratch(run: Run, name: str, content: bytes) -> Path:
    path = run.root / "scratch" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def picture(kind: str) -> bytes:
    stream = io.BytesIO()
    colours = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(colours).save(stream, kind)
    return stream.getvalue()


PICTURES = {kind: picture(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")}


def picture_bytes(value: tuple[str, Callable[[bytes], bytes]], run: Run) -> None:
    with contextlib.suppress(DAMAGED):
        assert decode(value[1](PICTURES[value[0]])).mode == "RGB"


def zip_bytes(edit: Callable[[bytes], bytes], run: Run) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(4):
            archive.writestr(f"class-{number % 2}/{number}.bmp", PICTURES["BMP"])
    path = scratch(run, "pictures.zip", edit(stream.getvalue()))
    harmless(lambda: load("imagefolder", path).image(0))


def idx_bytes(edit: Callable[[bytes], bytes], run: Run) -> None:
    pixels = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4]) + bytes(32)
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 0, 1])
    path = scratch(run, "train-images-idx3-ubyte.gz", edit(gzip.compress(pixels)))
    scratch(run, "train-labels-idx1-ubyte", edit(labels))
    harmless(lambda: load("mnist", path.parent).image(0))


BATCH = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}, protocol=2)


def pickle_bytes(edit: Callable[[bytes], bytes], run: Run) -> None:
    path = scratch(run, "data_batch_1", edit(BATCH))
    harmless(lambda: read_pickle(path, "CIFAR-10"))


# -- all of them ----------------------------------------------------------------------------------

ABOUT = {
    "reconstruction": {
        **{"loss": 0.5, "trace": [[1, 0.5]], "notes": ["x"], "ledger": ["update"]},
        **{"seconds": 0.1, "observation": "x"},
    },
    "truth": {"batches": [[0], [1, 0]], "defense_seed": 3, "trail": [{"defense": "x"}]},
    "checkpoint": [{"round": 1, "clients": 2, "train_loss": 0.5, "seconds": None}],
    "generator": {"name": "dcgan", "options": SMALL, "trained_on": {"name": "photos"}},
}


def about(kind: str) -> st.SearchStrategy[str]:
    good = ABOUT[kind]
    return st.one_of(st.just(json.dumps(good)), altered(good).map(json.dumps), SOME_JSON)


FUZZED: Loaders = {
    "observation json": (edits(), observation_bytes("client-0000.json")),
    "observation tensors": (edits(), observation_bytes("client-0000.safetensors")),
    "observation weights": (edits(), observation_bytes("weights.safetensors")),
    "reconstruction": (edits(), file_bytes(result_of, lambda r: Reconstruction.load(result_of(r)))),
    "reconstruction, sealed": (
        st.tuples(tensors(["images", "labels"]), about("reconstruction")),
        sealed_file(result_of, lambda run: Reconstruction.load(result_of(run))),
    ),
    "truth": (edits(), file_bytes(truth_of, truth)),
    "truth, sealed": (
        st.tuples(tensors(["images", "labels"]), about("truth")),
        sealed_file(truth_of, truth),
    ),
    "client state": (edits(), file_bytes(state_of, state)),
    "checkpoint": (edits(), file_bytes(lambda run: run.checkpoint, read_checkpoint)),
    "checkpoint, sealed": (
        st.tuples(tensors(["head.weight"]), about("checkpoint")),
        sealed_file(lambda run: run.checkpoint, read_checkpoint),
    ),
    "notebook": (
        edits(),
        file_bytes(
            result_of, lambda run: Notebook(shutil.copy(result_of(run), run.root / "n")).load()
        ),
    ),
    "small files": (edits(), read_small_files),
    "generator": (edits(), file_bytes(generator_of, read_generator)),
    "generator, sealed": (
        st.tuples(st.one_of(st.just(STATE), tensors(list(STATE)[:3])), about("generator")),
        sealed_file(generator_of, read_generator),
    ),
    "picture": (st.tuples(st.sampled_from(sorted(PICTURES)), edits()), picture_bytes),
    "zip": (edits(), zip_bytes),
    "idx": (edits(), idx_bytes),
    "pickle": (edits(), pickle_bytes),
}


@pytest.mark.parametrize("loader", FUZZED)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(loader: str, run: Run) -> None:
    assert fuzz(FUZZED, loader, FEW, run) >= 100


def test_observations_of_any_structure_are_read_or_refused(run: Run) -> None:
    good = read_json(observation_of(run))
    loaders: Loaders = {"observation tree": (altered(good), observation_tree)}
    assert fuzz(loaders, "observation tree", FEW, run) >= 100
    assert read_observation(observation_of(run)).client == 0  # the files were put back


def test_a_pickle_in_the_place_of_tensors_is_never_opened(run: Run) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("opened",))

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # as torch.save would lay it out
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    for content in (pickle.dumps(Evil()), packed.getvalue()):
        for path in (truth_of(run), result_of(run), run.checkpoint):
            held = path.read_bytes()
            path.write_bytes(content)
            assert not harmless(
                lambda: (
                    truth(run) and Reconstruction.load(result_of(run)) and (read_checkpoint(run))
                )
            )
            path.write_bytes(held)
