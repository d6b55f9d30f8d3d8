"""Commands with words that nobody would type: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import pytest
from hypothesis import strategies as st

from fedsim.cli import main
from fedsim.core.run import Run
from tests.fuzz.inputs import ODD, WORDS
from tests.fuzz.meeting import Loaders, fuzz

FEW = 40
NOWHERE = ["data.name=imagefolder", "data.path=/no/such"]  # last, so that no round ever runs
COMMANDS = [
    ["audit", "{}", *NOWHERE],
    ["audit", "name={}", *NOWHERE],
    ["audit", "data.name=imagefolder", "data.path=no/such{}"],
    ["audit", "model.name=x{}", *NOWHERE],
    ["audit", "attacks=[{{name: 'x{}'}}]", *NOWHERE],
    ["audit", "--resume", "no/such{}"],
    ["run", "train.strategy=x{}", *NOWHERE],
    ["bench", "no/such{}"],
    ["report", "no/such{}"],
    ["lint", "no/such{}.yaml"],
    ["lint", "defenses=[{{name: 'x{}'}}]"],
    ["attack", "no/such{}", "--attack", "x{}"],
    ["score", "no/such{}", "--vault", "no/such{}"],
    ["attack-captured", "no/such{}"],
    ["analyze", "pe", "no/such{}"],
    ["view", "no/such{}"],
    ["list", "x{}"],
    ["generator", "sample", "no/such{}", "-o", "no/such{}"],
    ["weights", "fetch", "x{}"],
    ["no{}"],
    ["audit", "--no{}"],
]


def told(words: list[str]) -> tuple[object, str]:
    """Exit code and standard error of a command, on a terminal that takes UTF-8 alone."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict") for _ in range(2)]
    before = sys.argv
    sys.argv = ["fedsim", *words]
    try:
        with (
            contextlib.redirect_stdout(streams[0]),
            contextlib.redirect_stderr(streams[1]),
            pytest.raises(SystemExit) as stop,
        ):
            main()
    finally:
        sys.argv = before
    for stream in streams:
        stream.flush()
    return stop.value.code, streams[1].buffer.getvalue().decode()  # type: ignore[attr-defined]


def command(value: tuple[list[str], str], run: Run) -> None:
    form, odd = value
    words = [word.format(odd) for word in form]
    code, err = told(words)
    assert code != 0, words
    assert "Traceback" not in err
    assert "\x1b" not in err


def typed(word: str) -> bool:
    """Whether a shell could pass it: bytes that are no UTF-8 are, half a surrogate pair is not."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


WORD = st.one_of(
    st.sampled_from([word for word in WORDS if typed(word)]),
    st.text(max_size=12).filter(typed),
    st.binary(max_size=12).filter(lambda raw: b"\0" not in raw).map(os.fsdecode),
    st.lists(st.sampled_from([word for word in ODD if typed(word)]), max_size=3).map("".join),
)
FUZZED: Loaders = {"commands": (st.tuples(st.sampled_from(COMMANDS), WORD), command)}


def test_a_command_with_any_words_ends_in_one_sentence(run: Run) -> None:
    assert fuzz(FUZZED, "commands", FEW, run) >= 30


@pytest.mark.parametrize("odd", [odd for odd in ODD if typed(odd)])
def test_the_words_of_an_error_are_shown_as_they_are(odd: str) -> None:
    code, err = told(["audit", "data.name=imagefolder", f"data.path=no/such{odd}x"])
    assert code in (1, 2)
    if odd.isprintable() and odd != "'":
        assert f"no/such{odd}x" in err
