"""The board: a public table of defenses that anyone may lower.

`entries` says what may stand on it, `federations` what is compared with what, `rows` what each
defense comes to, `page` shows it. `publication` writes what others need to attack a run,
`submission` reads what they made of it, `records` enters its scores.
"""

from __future__ import annotations

from fedsim.board.page import build_board
from fedsim.board.publication import publish
from fedsim.board.records import enter
from fedsim.board.submission import write_submission

__all__ = ["build_board", "enter", "publish", "write_submission"]
