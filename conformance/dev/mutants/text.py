# SPDX-License-Identifier: Apache-2.0
"""Source text by nodes of its syntax tree, which count columns in bytes."""

from __future__ import annotations

import ast
import re
from itertools import accumulate

from kvconform.dev.mutants.mutation import Edit

SpannedNode = ast.expr | ast.stmt


class Text:
    """The source of a module: offsets and text of nodes, and edits of them."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

    def start(self, node: SpannedNode) -> int:
        """Return the offset of the node's first byte."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: SpannedNode) -> int:
        """Return the offset after the node's last byte."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: SpannedNode) -> str:
        """Return the node's text."""
        return self.source[self.start(node) : self.end(node)].decode()

    def line(self, offset: int) -> str:
        """Return the line that contains an offset, without indentation."""
        first = self.source.rfind(b"\n", 0, offset) + 1
        last = self.source.find(b"\n", offset)
        return self.source[first : last if last >= 0 else None].decode().strip()

    def replaced(self, node: SpannedNode, text: str) -> Edit:
        """Return the edit that puts `text` in the place of a node."""
        return Edit(self.start(node), self.end(node), text)

    def swapped(self, one: SpannedNode, other: SpannedNode) -> Edit:
        """Return the edit that exchanges two nodes, of which `one` comes first."""
        between = self.source[self.end(one) : self.start(other)].decode()
        return Edit(self.start(one), self.end(other), f"{self.of(other)}{between}{self.of(one)}")

    def between(self, left: SpannedNode, right: SpannedNode, old: str, new: str) -> Edit | None:
        """Return the edit of the operator `old` between two nodes; None if it is not plain."""
        first, last = self.end(left), self.start(right)
        gap = self.source[first:last].decode()
        pattern = rf"\b{old}\b" if old.isalpha() else re.escape(old)
        found = [*re.finditer(pattern, gap)]
        if "#" in gap or len(found) != 1:
            return None
        low = first + len(gap[: found[0].start()].encode())
        return Edit(low, low + len(old.encode()), new)

    def without(self, parts: list[ast.expr], index: int) -> Edit:
        """Return the edit that removes one of several parts that commas separate."""
        if index + 1 < len(parts):
            return Edit(self.start(parts[index]), self.start(parts[index + 1]), "")
        return Edit(self.end(parts[index - 1]), self.end(parts[index]), "")
