# SPDX-License-Identifier: Apache-2.0
"""What verdicts rest on: the findings that explain each failed requirement of a row, and each risk.

A confirmed finding explains a failure if it names the requirement and fits the failure, by its case
or by the line that raised (`Finding.fits`). Older digests name requirements only, without cases.
There, a finding that names the requirement counts, and the pages say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvconform.dev.results.digest import Digest
from kvconform.dev.results.finding import Finding


@dataclass(frozen=True)
class Basis:
    """A requirement of one connector that failed or is at risk, with the engines where it did.

    `fitting` are the findings that fit a failure of it. `named` are those that only name it, for
    failures whose cases were not recorded. `status` is that of findings that explain: confirmed for
    failures, risk for risks. `open` are the recorded cases with a failure that none of these fits.
    """

    entry: str
    requirement: str
    engines: tuple[str, ...]
    status: str
    fitting: tuple[Finding, ...]
    named: tuple[Finding, ...]
    open: tuple[str, ...]

    @property
    def unexplained(self) -> bool:
        """Whether no finding explains any of its failures."""
        return not any(each.status == self.status for each in (*self.fitting, *self.named))


def failed(digest: Digest) -> list[str]:
    """Return the ids of the requirements that failed and count, by area."""
    return [name for area in digest.areas.values() for name in area.failed]


def at_risk(digest: Digest) -> list[str]:
    """Return the ids of the requirements that failed only where vLLM does not go, by area."""
    return [name for area in digest.areas.values() for name in area.risks or ()]


def explained_by(digest: Digest) -> str:
    """Return how precisely findings explain a row's failures, in words."""
    if not failed(digest):
        return ""
    return "requirement only" if digest.failures is None else "case"


def unexplained(digest: Digest, findings: Sequence[Finding]) -> list[str]:
    """Return the failed requirements of a row that no confirmed finding explains.

    If findings explain it in some cases, the number of the other cases follows.
    """
    said = []
    for name in failed(digest):
        basis = _basis(name, [digest], findings, "confirmed")
        if basis.unexplained:
            said.append(name)
        elif basis.open:
            cases = len((digest.failures or {})[name])
            said.append(f"{name} ({len(basis.open)} of {cases} cases)")
    return said


def bases(digests: Iterable[Digest], findings: Sequence[Finding]) -> list[Basis]:
    """Return what failures rest on, by entry and requirement."""
    return _bases(digests, findings, failed, "confirmed")


def risks(digests: Iterable[Digest], findings: Sequence[Finding]) -> list[Basis]:
    """Return what risks rest on, by entry and requirement."""
    return _bases(digests, findings, at_risk, "risk")


def _bases(
    digests: Iterable[Digest],
    findings: Sequence[Finding],
    which: Callable[[Digest], list[str]],
    status: str,
) -> list[Basis]:
    rows: dict[tuple[str, str], list[Digest]] = {}
    for digest in digests:
        for name in which(digest):
            rows.setdefault((digest.entry, name), []).append(digest)
    return [_basis(name, some, findings, status) for (_, name), some in sorted(rows.items())]


def _basis(name: str, digests: Sequence[Digest], findings: Sequence[Finding], status: str) -> Basis:
    entry = digests[0].entry
    about = [each for each in findings if each.names(entry, name)]
    failures = [failure for digest in digests for failure in _failures(digest, name)]
    fitting = [each for each in about if any(each.fits(*failure) for failure in failures)]
    recorded = all(digest.failures is not None for digest in digests)
    explaining = [each for each in about if each.status == status]
    return Basis(
        entry,
        name,
        tuple(
            f"{digest.engine} (random workloads)" if digest.seeds else digest.engine
            for digest in digests
        ),
        status,
        tuple(fitting),
        () if recorded else tuple(each for each in about if each not in fitting),
        tuple(
            sorted(
                {
                    failure[0]
                    for failure in failures
                    if not any(each.fits(*failure) for each in explaining)
                }
            )
        ),
    )


def _failures(digest: Digest, name: str) -> list[tuple[str, str | None]]:
    """Return the failures of a requirement, as (case, line that raised); [] if not recorded."""
    found: list[tuple[str, str | None]] = []
    for case, lines in (digest.failures or {}).get(name, {}).items():
        found += [(case, line) for line in lines] or [(case, None)]
    return found
