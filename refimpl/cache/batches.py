# SPDX-License-Identifier: Apache-2.0
"""Batched transfers: several values in one call of a back end, if it has such calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

from kvconform.refimpl.cache.backend import Backend

T = TypeVar("T")


@runtime_checkable
class Batching(Protocol):
    """A back end with batched calls. Both may raise StoreError."""

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values that there are, by key."""

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Store values. After StoreError, any of them may be stored."""


def get_many(backend: Backend, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values that there are, in one call if the back end can do that."""
    if not keys:
        return {}
    if isinstance(backend, Batching):
        return backend.get_many(keys)
    found = ((key, backend.get(key)) for key in keys)
    return {key: value for key, value in found if value is not None}


def set_many(backend: Backend, values: Mapping[str, bytes]) -> None:
    """Store values, in one call if the back end can do that."""
    if not values:
        return
    if isinstance(backend, Batching):
        backend.set_many(values)
        return
    for key, value in values.items():
        backend.set(key, value)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last list has what is left."""
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch
