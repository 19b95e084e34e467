# SPDX-License-Identifier: Apache-2.0
"""What an engine's KV events say is stored, and in which media."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Announced:
    """The blocks that KV events have announced and not withdrawn.

    A block may be in several media at once, such as CPU memory and files. It is announced until it
    was withdrawn from each of them.
    """

    def __init__(self) -> None:
        self.tokens: dict[Any, int] = {}
        """Tokens of each announced block, by its hash."""
        self._where: dict[Any, set[Any]] = {}
        self._named: dict[Any, set[Any]] = {}

    def add(self, hashes: Iterable[Any], medium: Any, tokens: int) -> None:
        """Announce blocks of so many tokens in a medium."""
        for key in hashes:
            self.tokens[key] = tokens
            self._where.setdefault(key, set()).add(medium)
            self._named.setdefault(key, set()).add(medium)

    def withdraw(self, hashes: Iterable[Any], medium: Any) -> None:
        """Withdraw blocks from a medium; from all, if no announcement has named this one."""
        for key in hashes:
            left = self._where.get(key, set()) - {medium}
            if left and medium in self._named[key]:
                self._where[key] = left
            else:
                self.tokens.pop(key, None)
                self._where.pop(key, None)

    def media(self, key: Any) -> set[Any]:
        """Return the media that announcements of a block have named since all was cleared."""
        return self._named.get(key, set())

    def clear(self) -> None:
        """Withdraw everything."""
        self.tokens.clear()
        self._where.clear()
        self._named.clear()
