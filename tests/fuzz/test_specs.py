"""Specs, overrides, benches and parameters of any kind: a value, or one sentence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from fedsim.attacks import ATTACKS, create_attack
from fedsim.bench.cells import load_bench
from fedsim.core.registry import resolve
from fedsim.core.run import Run
from fedsim.core.spec import load_spec
from fedsim.defenses import DEFENSES, create_defense
from tests.fuzz.inputs import BENCH, GOOD, KEYS, SOME_JSON, TREES, WORDS, aliases, altered, edits
from tests.fuzz.meeting import Loaders, fuzz, harmless

FEW = 115


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


def attack_parameters(value: tuple[str, dict[str, Any]], run: Run) -> None:
    harmless(lambda: create_attack(value[0], **value[1]))


def defense_parameters(value: tuple[str, dict[str, Any]], run: Run) -> None:
    harmless(lambda: create_defense(value[0], **value[1]))


def parameters(kind: str, table: dict[str, str]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A name of the table, and values for some of its parameters."""

    def of(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
        fields = dataclasses.fields(resolve(kind, table, name))
        known = [field.name for field in fields if field.name != "name"] or ["none"]
        values = st.dictionaries(st.sampled_from(known), TREES, max_size=4)
        return st.tuples(st.just(name), values)

    return st.sampled_from(sorted(table)).flatmap(of)


LARGE = f"0x{'f' * 9000}"  # more digits than Python writes down
DOTTED = st.lists(KEYS, min_size=1, max_size=3).map(".".join)
TITLED = st.sampled_from(WORDS).map(
    lambda title: {**GOOD, "attacks": [{"name": "dlg", "title": title}]}
)
TEXTS = st.one_of(
    st.text(),
    aliases(),
    TREES.map(lambda tree: json.dumps(tree)),
    altered(GOOD).map(lambda tree: yaml.safe_dump(tree, allow_unicode=True)),
    st.tuples(edits(), st.just(yaml.safe_dump(GOOD).encode())).map(
        lambda pair: pair[0](pair[1]).decode("latin-1")
    ),
    st.sampled_from(["[" * 5000, "a: &a {b: *a}", "model: {options: &a {b: *a}}", "? {a: 1}\n: 2"]),
    st.sampled_from([f"seed: {LARGE}", f"train: {{lr: {LARGE}}}", "seed: 1" + ":59" * 999]),
    st.sampled_from(
        ["data: !!python/object/apply:os.system [true]", "model: {options: !!set {a}}"]
    ),
    st.sampled_from(["model: {options: {a: !!binary /w==}}", "seed: 1:99:99", "name: 2020-13-45"]),
)

FUZZED: Loaders = {
    "spec tree": (st.one_of(TREES, altered(GOOD), TITLED), spec_tree),
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
    "attack parameters": (parameters("attack", ATTACKS), attack_parameters),
    "defense parameters": (parameters("defense", DEFENSES), defense_parameters),
}


@pytest.mark.parametrize("loader", FUZZED)
def test_a_spec_of_any_kind_is_read_or_refused_in_one_sentence(loader: str, run: Run) -> None:
    assert fuzz(FUZZED, loader, FEW, run) >= 100
