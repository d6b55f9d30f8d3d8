"""The progress bar of work on many pictures: on a terminal, or nowhere."""

from __future__ import annotations

import pytest

from fedsim.clients.data.progress import bar


@pytest.mark.parametrize(("shown", "terminal"), [(True, "1"), (False, "1"), (True, "0")])
def test_a_bar_is_drawn_on_a_terminal_and_only_where_it_is_wanted(
    shown: bool, terminal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("TTY_INTERACTIVE", terminal)
    with bar("looking at pictures", 4, shown) as done:
        done(3)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("looking at pictures" in err) is (shown and terminal == "1")
