# SPDX-License-Identifier: Apache-2.0
"""KV as the engine knows it: content ids, or the rows that they are encoded to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import numpy as np

from kvconform.kernels.codes import CodeBook

Index: TypeAlias = slice | np.ndarray
"""A part of a content's slots."""
ALL = slice(None)


class Content:
    """The KV of n slots, in all layers. A device encodes ids itself; host memory takes rows.

    Ids and rows are each made when they are first asked for. `nonce`: see CodeBook.rows.
    """

    def __init__(
        self, ids: Callable[[], np.ndarray], rows: Callable[[], np.ndarray], nonce: int = 0
    ) -> None:
        self._ids, self._rows, self.nonce = ids, rows, nonce

    @classmethod
    def of(cls, book: CodeBook, ids: np.ndarray, nonce: int = 0) -> Content:
        """Return the content with these ids [n] uint64."""
        return cls(lambda: ids, lambda: book.rows(ids, nonce), nonce)

    @cached_property
    def ids(self) -> np.ndarray:
        """Content ids [n] uint64."""
        return self._ids()

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows [n, layers, heads, 2 * head_dim] uint8."""
        return self._rows()


def part_of(index: Index, places: np.ndarray) -> np.ndarray:
    """Return the index of those elements of `index` that are at `places`; a slice is ALL."""
    return places if isinstance(index, slice) else index[places]
