# SPDX-License-Identifier: Apache-2.0
"""Expected failures and waivers: FAIL becomes XFAIL, and an expectation that nothing fulfils becomes XPASS. Strict, and never silent.

A connector's entries (profile.Expected) come from its own repository and concern requirements. The suite's waivers (profile.Waiver)
concern guarantees that a vLLM version is known to break.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from datetime import date

from kvconform.profile import Expected, Waiver
from kvconform.verdict import Row, Verdict


def apply_expected(rows: Sequence[Row], entries: Iterable[Expected], *, today: date, complete: bool = True) -> list[str]:
    """Change the rows that the entries cover, in place, and return one sentence per entry that is wrong.

    An entry whose rows contain a FAIL makes these XFAIL; one whose rows are exercised and all PASS makes them XPASS. Wrong is an entry that
    covers no row at all (unless not `complete`: part of the suite was left out) and one that has expired, which then changes nothing.
    """
    problems: list[str] = []
    for entry in entries:
        name = f"expected failure of {entry.requirement} on {entry.case}"
        covered = [row for row in rows if entry.matches(row.requirement, row.case)]
        if entry.expired(today):
            problems.append(f"{name} expired on {entry.expires}")
        elif covered:
            settle(covered, entry)
        elif complete:
            problems.append(f"{name} matches nothing")
    return problems


def apply_waivers(rows: Sequence[Row], waivers: Iterable[Waiver], *, vllm: str, today: date) -> list[str]:
    """The same for the suite's waivers, on guarantees only. One that concerns other engines or versions is no error."""
    problems: list[str] = []
    for waiver in waivers:
        covered = [row for row in rows if row.kind == "guarantee" and waiver.applies(row.to_dict(), vllm)]
        if waiver.expired(today):
            problems.append(f"waiver of {waiver.requirement} expired on {waiver.expires}")
        elif covered:
            settle(covered, waiver)
    return problems


def settle(covered: Sequence[Row], entry: Expected) -> None:
    """FAIL -> XFAIL; if none failed, PASS -> XPASS."""
    failed = [row for row in covered if row.verdict in (Verdict.FAIL, Verdict.XFAIL)]
    for row in failed:
        row.verdict = Verdict.XFAIL
    if not failed:
        for row in covered:
            if row.verdict is Verdict.PASS:
                row.verdict = Verdict.XPASS
                row.message = f"was expected to fail: {entry.reason}"


def unknown_requirements(entries: Iterable[Expected], known: Iterable[str]) -> list[str]:
    """The requirement globs of entries that match no requirement of the specification at all."""
    ids = list(known)
    return [entry.requirement for entry in entries if not fnmatch.filter(ids, entry.requirement)]
