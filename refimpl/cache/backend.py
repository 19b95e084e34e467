# SPDX-License-Identifier: Apache-2.0
"""The protocol of a store's back end, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class StoreError(Exception):
    """A back end did not do what was asked: it does not respond, is full, or is read-only."""


class Full(StoreError):
    """There is no room for a value, and there may be if others are deleted."""


class Refused(StoreError):
    """A server responded that it does not do what was asked. It may do something else."""


class MissingPackage(ModuleNotFoundError):
    """An optional package is not installed. `what` needs it, `extra` of kvconform installs it."""

    def __init__(self, what: str, package: str, extra: str = "stores") -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed "
            f"(pip install 'kvconform[{extra}]')",
            name=package,
        )


class Backend(Protocol):
    """Values by key. Keys are texts whose parts are separated by `/`; values are bytes.

    Every method may raise StoreError. A value is visible as a whole or not at all; the last of
    several writers wins.
    """

    def exists(self, key: str) -> bool:
        """Return whether there is a value."""

    def get(self, key: str) -> bytes | None:
        """Return the value; None if there is none."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value, in the place of an earlier one."""

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that begin with `prefix`, in any order."""

    def delete(self, key: str) -> None:
        """Remove a value, if there is one."""

    def close(self) -> None:
        """Release connections. May be called twice."""
