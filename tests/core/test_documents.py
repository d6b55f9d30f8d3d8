"""YAML within bounds: what a few lines may stand for."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from fedsim.core.documents import MOST_BYTES, MOST_LEVELS, read_yaml
from fedsim.core.errors import SpecError
from fedsim.core.spec import load_spec


def laughs(levels: int, width: int = 9) -> str:
    """Each line repeats the one before it ``width`` times."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


def test_what_is_repeated_once_or_twice_is_read() -> None:
    twice = [["x"], ["x"]]
    assert read_yaml(laughs(2, 2), "it") == {"a0": ["x"], "a1": twice, "a2": [twice, twice]}
    merged = read_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}", "it")
    assert merged == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
    assert read_yaml("", "it") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (laughs(9), "more than 20000 values, its aliases written out"),
        (laughs(2 * MOST_LEVELS, 1), f"nested more than {MOST_LEVELS} levels deep"),
        ("[" * 5000, f"nested more than {MOST_LEVELS} levels deep"),
        ("a: &a {b: *a}", "a part of it contains itself"),
        ("a: &a [*a]", "a part of it contains itself"),
        ("a: *nobody", "not valid YAML at line 1"),
        ("x" * (MOST_BYTES + 1), "larger than 256 kB"),
        ("\0", "not valid YAML"),
    ],
    ids=lambda text: text[:40],
)
def test_what_stands_for_too_much_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=f"^it: .*{words}"):
        read_yaml(text, "it")


def test_a_document_of_aliases_takes_no_room() -> None:
    tracemalloc.start()
    with pytest.raises(SpecError):
        read_yaml(laughs(30), "it")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.parametrize("merge", ["<<: [{}]", "k: [{}]"])
def test_specs_files_and_overrides_are_bounded_alike(tmp_path: Path, merge: str) -> None:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 9):
        again = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {{{merge.format(again)}}}")
    (tmp_path / "spec.yaml").write_text("\n".join(lines))
    with pytest.raises(SpecError, match=r"spec\.yaml: it holds more than"):
        load_spec(tmp_path / "spec.yaml")
    with pytest.raises(SpecError, match=r"^override 'data=.*: it holds more than"):
        load_spec({}, [f"data={{{', '.join(lines)}}}"])


def test_a_spec_file_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(SpecError, match="larger than 256 kB"):
        load_spec(Path("/dev/zero"))


def test_numbers_of_thousands_of_digits_are_told(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    for text in (f"seed: 0x{'f' * 9000}", f"train: {{lr: 0x{'f' * 9000}}}"):
        path.write_text(text)
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        assert len(str(caught.value)) < 300 + len(str(path))
