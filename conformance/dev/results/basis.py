# SPDX-License-Identifier: Apache-2.0
"""What a NOT CONFORMANT rests on: the findings that explain each failed requirement of a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvconform.dev.results.digest import Digest
from kvconform.dev.results.finding import Finding


@dataclass(frozen=True)
class Basis:
    """A failed requirement of one connector, with the engines where it failed.

    `confirmed` are the findings that explain it; `others` those that name it and are not confirmed:
    risks, open questions and withdrawn ones. A digest names requirements and no cases, so a
    requirement with a confirmed finding may have failures with another cause, too.
    """

    entry: str
    requirement: str
    engines: tuple[str, ...]
    confirmed: tuple[Finding, ...]
    others: tuple[Finding, ...]

    @property
    def unexplained(self) -> bool:
        """Whether no confirmed finding explains it."""
        return not self.confirmed


def failed(digest: Digest) -> list[str]:
    """Return the ids of the requirements that failed and count, by area."""
    return [name for area in digest.areas.values() for name in area.failed]


def unexplained(digest: Digest, findings: Sequence[Finding]) -> list[str]:
    """Return the failed requirements of a row that no confirmed finding explains."""
    return [
        name
        for name in failed(digest)
        if not any(
            each.status == "confirmed" and each.explains(digest.entry, name) for each in findings
        )
    ]


def bases(digests: Iterable[Digest], findings: Sequence[Finding]) -> list[Basis]:
    """Return what rows rest on, by entry and requirement."""
    engines: dict[tuple[str, str], list[str]] = {}
    for digest in digests:
        where = f"{digest.engine} (random workloads)" if digest.seeds else digest.engine
        for name in failed(digest):
            engines.setdefault((digest.entry, name), []).append(where)
    return [
        _basis(entry, name, where, findings) for (entry, name), where in sorted(engines.items())
    ]


def _basis(entry: str, name: str, where: Sequence[str], findings: Sequence[Finding]) -> Basis:
    about = [each for each in findings if each.explains(entry, name)]
    return Basis(
        entry,
        name,
        tuple(where),
        tuple(each for each in about if each.status == "confirmed"),
        tuple(each for each in about if each.status != "confirmed"),
    )
