"""What the loaders meet: trees, texts, bytes and tensors that nobody would write."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from torch import Tensor

GOOD = yaml.safe_load((Path(__file__).parents[2] / "experiments" / "demo.yaml").read_text())
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
# Markup, control characters, half a surrogate pair, bytes of a name that are no UTF-8.
ODD = ["[/y]", "[bold", "[red]x[/]", "\x1b]0;x\x07", "\r", "\ud800", "\udcff", "%s", "{x}", "'"]
WORDS = [
    *("", "name", "A", "photos", "patch_solve", "mjp", "tests.faults:Crashes", "json:loads", ":"),
    *("../..", "..", "~nobody/x", "\0", "1e400", "2020-99-99", "0x", "=", "${x}", "a\nb", "delta"),
    *("\ud7ff", "prior_only", "ig-2", "hf:pandas", *ODD),
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
SOME_JSON = st.one_of(st.text(max_size=20), TREES.map(json.dumps))


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


@st.composite
def aliases(draw: st.DrawFn) -> str:
    """YAML in which every line repeats the one before it several times."""
    levels, width = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["[{}]", "{{k: [{}]}}"]))
    lines = ["a0: &a0 x"]
    for level in range(1, levels + 1):
        again = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {kind.format(again)}")
    key = draw(st.sampled_from(["model", "data", "attacks", "options"]))
    return "\n".join([*lines, f"{key}: {{options: *a{levels}}}"])


TOKENS = [
    *(b"F32", b"F64", b"F16", b"BF16", b"I64", b"U8", b"BOOL", b"F8_E4M3", b"F8_E8M0", b"C64"),
    *(b"F4", b"shape", b"dtype", b"data_offsets", b"__metadata__", b"about", b"sealed", b"images"),
    *(b"labels", b"[3", b"[1", b"[0", b"[-1", b"[99999999999999999999", b"null", b"{", b"}", b'"'),
    *(b"0", b"1", b"9", b"true", b"NaN", b"1e999", b"\\ud800", b"\x80\x04\x95", b"PK\x03\x04"),
]


@st.composite
def edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What happens to the bytes of a file: cut, flipped, swapped, stretched, replaced."""
    kind = draw(st.sampled_from(["cut", "flip", "bit", "token", "insert", "length", "replace"]))
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
        if kind == "bit":
            changed = bytes(byte ^ (1 << other % 8) for byte in content[place : place + 1])
            return content[:place] + changed + content[place + 1 :]
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
