"""Loaders meet anything: out comes what they read, or one sentence. Never another error, and no
pickle is ever opened."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.audit.stages import audit
from fedsim.bench.cells import load_bench
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import FedsimError
from fedsim.core.files import read_json, save_tensors
from fedsim.core.notebook import Notebook
from fedsim.core.observation import check_observation, is_finite, read_observation
from fedsim.core.run import Run
from fedsim.core.spec import load_spec
from fedsim.core.vault import Vault
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.scoring.canary import check_canaries
from fedsim.scoring.scores import failures
from tests.conftest import small_spec

FEW, MANY = 115, 750  # inputs a loader
Check = Callable[[Any, Run], object]


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every pickle that was opened: none."""
    found: list[str] = []

    def spy(name: str) -> Callable[..., None]:
        def refuse(*args: object, **kwargs: object) -> None:
            found.append(name)
            raise AssertionError(f"{name} was called")

        return refuse

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, spy(f"pickle.{name}"))
    monkeypatch.setattr(torch, "load", spy("torch.load"))
    yield found
    assert found == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose files are overwritten, one at a time."""
    spec = small_spec(
        "data.clients=2",
        "train={rounds: 1, clients_per_round: 2, evaluate: false}",
        "model.options={patch_size: 8, depth: 1, embed_dim: 48, num_heads: 2}",
        "defenses=[{name: top_k, sparsity: 0.5, feedback: true}]",
        "attacks=[{name: prior_only}]",
    )
    return audit(spec, tmp_path_factory.mktemp("fuzz") / "run")


# -- inputs -------------------------------------------------------------------------------------

GOOD = yaml.safe_load((Path(__file__).parent.parent / "experiments" / "demo.yaml").read_text())
BENCH = {
    **{key: GOOD[key] for key in ("data", "model", "train", "attacks")},
    "bench": {
        "defenses": [
            {"name": "gaussian_noise", "strengths": [{"std": 0.1}], "with": [{"name": "clipping"}]},
            {"name": "batch size", "levers": ["train.batch_size=2"]},
        ],
        "utility": {"train": {"rounds": 2}},
        "seeds": [0],
    },
}
WORDS = [
    *("", "name", "A", "photos", "patch_solve", "mjp", "tests.faults:Crashes", "json:loads", ":"),
    *(
        "../..",
        "~nobody/x",
        "\0",
        "1e400",
        "2020-99-99",
        "0x",
        "=",
        "${x}",
        "a\nb",
        "delta",
        "\ud7ff",
    ),
]
NUMBERS = [0, 1, -1, 2, 10**19, -(10**400), 0.5, 1e308, float("nan"), float("inf"), -0.0]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=12),
)
KEYS = st.one_of(st.sampled_from([*GOOD, *GOOD["train"], "bench", "seed", "title", "options"]))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(KEYS, st.text(max_size=6)), inner, max_size=4),
    ),
    max_leaves=12,
)


@st.composite
def altered(draw: st.DrawFn, tree: Any) -> Any:
    """A good tree with one to three of its nodes replaced, taken out or added to."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        node = tree
        while True:
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not places:
                break
            place = draw(st.sampled_from(places))
            if isinstance(node[place], dict | list) and draw(st.integers(0, 3)):
                node = node[place]
                continue
            if draw(st.integers(0, 5)):
                node[place] = draw(TREES)
            else:
                del node[place]
            break
        if isinstance(node, dict) and not draw(st.integers(0, 3)):
            node[draw(KEYS)] = draw(TREES)
    return tree


TOKENS = [
    *(b"F32", b"F64", b"F16", b"BF16", b"I64", b"U8", b"BOOL", b"F8_E4M3", b"F8_E8M0", b"C64"),
    *(b"F4", b"shape", b"dtype", b"data_offsets", b"__metadata__", b"about", b"sealed", b"images"),
    *(b"labels", b"[3", b"[1", b"[0", b"[-1", b"[99999999999999999999", b"null", b"{", b"}", b'"'),
    *(b"0", b"1", b"9", b"true", b"NaN", b"1e999", b"\\ud800", b"\x80\x04\x95", b"PK\x03\x04"),
]


@st.composite
def edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What happens to the bytes of a file: cut, flipped, swapped, stretched, replaced."""
    kind = draw(st.sampled_from(["cut", "flip", "token", "insert", "length", "replace"]))
    at, other = draw(st.floats(0, 1)), draw(st.integers(0, 255))
    first, second = draw(st.sampled_from(TOKENS)), draw(st.sampled_from(TOKENS))
    some = draw(st.binary(max_size=40))
    early = draw(st.booleans())  # the header of a file is more telling than its numbers

    def edit(content: bytes) -> bytes:
        size = min(len(content), 2000) if early else len(content)
        place = int(at * max(0, size - 1))
        if kind == "cut":
            return content[:place]
        if kind == "flip":
            return content[:place] + bytes([other]) + content[place + 1 :]
        if kind == "token":
            found = content.find(first, place)
            found = content.find(first) if found < 0 else found
            return (
                content
                if found < 0
                else b"".join([content[:found], second, content[found + len(first) :]])
            )
        if kind == "insert":
            return content[:place] + some + content[place:]
        if kind == "length":
            return int(at * 2**63).to_bytes(8, "little") + content[8:]
        return some

    return edit


@st.composite
def tensors(draw: st.DrawFn, names: list[str]) -> dict[str, Tensor]:
    """Tensors of any type and shape under names that mean something, or do not."""
    types = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
    found = {}
    for name in draw(st.lists(st.sampled_from([*names, "other"]), unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=5))
        found[name] = torch.full(shape, draw(st.integers(0, 3)), dtype=draw(st.sampled_from(types)))
    return found


# -- checks: each overwrites one file of the run, reads it, and puts it back ---------------------


def harmless(call: Callable[[], object]) -> bool:
    """Whether the call worked; an error must be one of ours, and one sentence."""
    try:
        call()
    except FedsimError as error:
        words = str(error)
    else:
        return True
    assert words
    assert "\n" not in words
    return False


def with_file(path: Path, content: bytes, *calls: Callable[[], object]) -> None:
    held = path.with_name(f"{path.name}.held")
    shutil.move(path, held)
    try:
        path.write_bytes(content)
        for call in calls:
            harmless(call)
    finally:
        shutil.move(held, path)


def observation_of(run: Run) -> Path:
    return run.observations / "round-0001" / "client-0000.json"


def truth_of(run: Run) -> Path:
    return run.vault / "round-0001" / "client-0000.safetensors"


def result_of(run: Run) -> Path:
    return run.reconstructions / "prior_only/round-0001/client-0000-trial-0.safetensors"


def spec_tree(value: Any, run: Run) -> None:
    if isinstance(value, dict):
        harmless(lambda: load_spec(value))
        harmless(lambda: load_bench(value))


def spec_text(text: str, run: Run) -> None:
    path = run.root / "fuzzed.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    if harmless(lambda: load_spec(path)):
        spec = load_spec(path)
        path.write_text(spec.to_yaml())
        assert load_spec(path).digest() == spec.digest()  # or it could not be resumed
    harmless(lambda: load_bench(path))
    path.unlink()


def override(value: tuple[str, str], run: Run) -> None:
    harmless(lambda: load_spec(GOOD, [f"{value[0]}={value[1]}"]))
    harmless(lambda: load_spec(GOOD, [value[1]]))


def bench_tree(value: Any, run: Run) -> None:
    harmless(lambda: load_bench(value))


def observation_bytes(which: str) -> Check:
    def check(edit: Callable[[bytes], bytes], run: Run) -> None:
        about = observation_of(run)
        path = about.parent / which
        calls = [lambda: read_observation(about), lambda: check_observation(about)]
        with_file(path, edit(path.read_bytes()), *calls, lambda: is_finite(about))

    return check


def observation_tree(value: Any, run: Run) -> None:
    path = observation_of(run)
    with_file(path, json.dumps(value).encode(), lambda: read_observation(path))


def sealed_file(find: Callable[[Run], Path], read: Callable[[Run], object]) -> Check:
    """A file that is whole, and holds tensors and words that nobody would write."""

    def check(value: tuple[dict[str, Tensor], str], run: Run) -> None:
        whole = run.root / "whole.safetensors"
        save_tensors(whole, value[0], {"about": value[1], "rounds": value[1]})
        with_file(find(run), whole.read_bytes(), lambda: read(run))

    return check


def file_bytes(find: Callable[[Run], Path], read: Callable[[Run], object]) -> Check:
    def check(edit: Callable[[bytes], bytes], run: Run) -> None:
        path = find(run)
        with_file(path, edit(path.read_bytes()), lambda: read(run))

    return check


def read_small_files(edit: Callable[[bytes], bytes], run: Run) -> None:
    """What is read back without tensors: canaries, failures, events, tables."""
    from fedsim.campaign.plan import jobs_of, victims

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


def state_of(run: Run) -> Path:
    return truth_of(run).with_suffix(".state.safetensors")


def truth(run: Run) -> object:
    return Vault(run.vault).read(1, 0).replay()


def state(run: Run) -> object:
    return Vault(run.vault).read_state(2, 0)


ABOUT = {
    "reconstruction": {
        **{"loss": 0.5, "trace": [[1, 0.5]], "notes": ["x"], "ledger": ["update"]},
        **{"seconds": 0.1, "observation": "x"},
    },
    "truth": {"batches": [[0], [1, 0]], "defense_seed": 3, "trail": [{"defense": "x"}]},
    "checkpoint": [{"round": 1, "clients": 2, "train_loss": 0.5, "seconds": None}],
}
SOME_JSON = st.one_of(st.text(max_size=20), TREES.map(json.dumps))


def about(kind: str) -> st.SearchStrategy[str]:
    good = ABOUT[kind]
    return st.one_of(st.just(json.dumps(good)), altered(good).map(json.dumps), SOME_JSON)


DOTTED = st.lists(KEYS, min_size=1, max_size=3).map(".".join)
TEXTS = st.one_of(
    st.text(),
    TREES.map(lambda tree: json.dumps(tree)),
    altered(GOOD).map(lambda tree: yaml.safe_dump(tree, allow_unicode=True)),
    st.tuples(edits(), st.just(yaml.safe_dump(GOOD).encode())).map(
        lambda pair: pair[0](pair[1]).decode("latin-1")
    ),
    st.sampled_from(["[" * 5000, "a: &a {b: *a}", "model: {options: &a {b: *a}}", "? {a: 1}\n: 2"]),
    st.sampled_from(
        ["data: !!python/object/apply:os.system [true]", "model: {options: !!set {a}}"]
    ),
    st.sampled_from(["model: {options: {a: !!binary /w==}}", "seed: 1:99:99", "name: 2020-13-45"]),
)

FUZZED: dict[str, tuple[st.SearchStrategy[Any], Check]] = {
    "spec tree": (st.one_of(TREES, altered(GOOD)), spec_tree),
    "spec text": (TEXTS, spec_text),
    "override": (
        st.tuples(st.one_of(DOTTED, st.text(max_size=8)), st.one_of(SOME_JSON, st.text())),
        override,
    ),
    "bench": (altered(BENCH), bench_tree),
    "bench section": (
        st.one_of(
            altered(BENCH["bench"]).map(lambda section: {**BENCH, "bench": section}),
            altered(BENCH["bench"]["defenses"][0]).map(
                lambda axis: {**BENCH, "bench": {"defenses": [axis]}}
            ),
        ),
        bench_tree,
    ),
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
}


def fuzz(loader: str, examples: int, run: Run) -> int:
    """How many inputs a loader met."""
    inputs, check = FUZZED[loader]
    met = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,  # the same inputs every time, like everything here
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def meet(value: Any) -> None:
        nonlocal met
        met += 1
        check(value, run)

    meet()
    return met


@pytest.mark.parametrize("loader", FUZZED)
def test_a_loader_answers_anything_with_a_value_or_one_sentence(loader: str, run: Run) -> None:
    assert fuzz(loader, FEW, run) >= 100


def test_observations_of_any_structure_are_read_or_refused(run: Run) -> None:
    good = read_json(observation_of(run))
    FUZZED["observation tree"] = (altered(good), observation_tree)
    assert fuzz("observation tree", FEW, run) >= 100
    assert read_observation(observation_of(run)).client == 0  # the files were put back


@pytest.mark.slow
def test_ten_thousand_inputs_are_answered(run: Run) -> None:
    counts = {loader: fuzz(loader, MANY, run) for loader in list(FUZZED)}
    print(counts)
    assert sum(counts.values()) >= 10_000


def test_a_pickle_in_the_place_of_tensors_is_never_opened(run: Run) -> None:
    import io
    import zipfile

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
