"""Documents: YAML that anybody may have written, read within bounds.

A few lines of YAML can stand for gigabytes: an alias repeats what its anchor holds, and may hold
other aliases. So a document is weighed while it is read, every alias with all that it stands for.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, SequenceNode

from fedsim.core.errors import SpecError

MOST_BYTES = 256 * 1024
MOST_NODES = 20_000  # values and keys, aliases written out
MOST_LEVELS = 32


class _Excess(Exception):  # noqa: N818 - what is wrong, in words
    """The document is beyond the bounds."""


def read_yaml(text: str, where: str) -> Any:
    """What a document says; what is wrong with it is one sentence that begins with ``where``."""
    if len(text) > MOST_BYTES:
        raise SpecError(f"{where}: it is larger than {MOST_BYTES // 1024} kB, which no spec is.")
    try:
        loader = _Bounded(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node)
    except _Excess as error:
        raise SpecError(f"{where}: {error}.") from None
    except Exception as error:  # the parser has more ways to fail than errors of its own
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise SpecError(f"{where}: not valid YAML{line}.") from error


class _Bounded(yaml.SafeLoader):
    """Weighs every node as soon as its children are known."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._weights: dict[int, tuple[int, int]] = {}  # nodes and levels, itself counted
        self._level = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        again = self.check_event(AliasEvent)
        self._level += 1
        if self._level > MOST_LEVELS:
            raise _Excess(f"it is nested more than {MOST_LEVELS} levels deep")
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None and not again:
            self._weights[id(node)] = self._weigh(node)
        elif id(node) not in self._weights:
            raise _Excess("a part of it contains itself")
        return node

    def _weigh(self, node: Node) -> tuple[int, int]:
        children: list[Node] = []
        if isinstance(node, MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, SequenceNode):
            children = node.value
        weights = [self._weights[id(child)] for child in children]
        size = 1 + sum(nodes for nodes, _ in weights)
        levels = 1 + max((below for _, below in weights), default=0)
        if size > MOST_NODES:
            raise _Excess(f"it holds more than {MOST_NODES} values, its aliases written out")
        if levels > MOST_LEVELS:
            raise _Excess(f"it is nested more than {MOST_LEVELS} levels deep")
        return size, levels
